// AdamW on the device, for resident tiles. Compiled at run time by device_adam.py, which puts adamw.h before it.
// If one of the gradients' norms is not finite, nothing is changed and a flag is set, so that the host need not wait.
// The kernel is bound by memory: a thread takes four elements at a time, in one access per array.

namespace {

template <class T, int Bytes>
struct alignas(Bytes) Four {
  T at[4];
};

__device__ bool all_finite(const float* norms, int64_t count) {
  for (int64_t i = 0; i < count; ++i)  // the norms of one tile's parameters: few, and the same for all threads
    if ((BITS(norms[i]) & 0x7F800000u) == 0x7F800000u) return false;
  return true;
}

template <class Weight, class Gradient>
__device__ void run(Weight* weights, int16_t* remainders, const Gradient* gradients, float* first, float* second,
                    const Segment& s, float scale) {
  constexpr bool is_split = sizeof(Weight) == sizeof(BFloat16);
  using Weights = Four<Weight, 4 * sizeof(Weight)>;
  using Remainders = Four<int16_t, 8>;
  using Gradients = Four<Gradient, 4 * sizeof(Gradient)>;
  using Moments = Four<float, 16>;
  const int64_t step = 4 * int64_t{blockDim.x} * gridDim.x;
  int64_t i = s.start + 4 * (int64_t{blockIdx.x} * blockDim.x + threadIdx.x);  // parameters begin on 128 bytes
  for (; i + 4 <= s.stop; i += step) {
    Weights w = *reinterpret_cast<Weights*>(weights + i);
    Remainders r = {};
    if (is_split) r = *reinterpret_cast<Remainders*>(remainders + i);
    const Gradients g = *reinterpret_cast<const Gradients*>(gradients + i);
    Moments m = *reinterpret_cast<Moments*>(first + i);
    Moments v = *reinterpret_cast<Moments*>(second + i);
    for (int k = 0; k < 4; ++k) update(w.at[k], r.at[k], g.at[k], m.at[k], v.at[k], scale, s);
    *reinterpret_cast<Weights*>(weights + i) = w;
    if (is_split) *reinterpret_cast<Remainders*>(remainders + i) = r;
    *reinterpret_cast<Moments*>(first + i) = m;
    *reinterpret_cast<Moments*>(second + i) = v;
  }
  for (; i < s.stop; ++i) {  // one thread updates the last few
    int16_t none = 0;
    update(weights[i], is_split ? remainders[i] : none, gradients[i], first[i], second[i], scale, s);
  }
}

}  // namespace

// A segment is passed field by field, since launches take numbers only.
#define KERNEL(name, Weight, Gradient)                                                                                     \
  extern "C" __global__ void name(Weight* weights, int16_t* remainders, const Gradient* gradients, float* first,           \
                                  float* second, float scale, const float* norms, int64_t norm_count, int32_t* kept,       \
                                  int64_t start, int64_t stop, float decay, float gradient_weight, float beta2,            \
                                  float square_weight, float root_correction, float inverse, float rest, float eps,        \
                                  float negative_step) {                                                                   \
    if (!all_finite(norms, norm_count)) {                                                                                  \
      if (blockIdx.x == 0 && threadIdx.x == 0) *kept = 1;                                                                  \
      return;                                                                                                              \
    }                                                                                                                      \
    run(weights, remainders, gradients, first, second,                                                                     \
        Segment{start, stop, decay, gradient_weight, beta2, square_weight, root_correction, inverse, rest, eps,            \
                negative_step}, scale);                                                                                    \
  }

KERNEL(adamw_bfloat16, BFloat16, BFloat16)
KERNEL(adamw_float32, float, float)
