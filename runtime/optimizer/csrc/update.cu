// Updates on the device: tiles that stay there, and those that visit. Compiled at run time by device_update.py, which puts
// values.h, the definitions of a rule and element.h before it, as update.cpp has them, with the same bits.
//
// If one of the gradients' norms is not finite, nothing is changed and a flag is set, so that the host need not wait. The
// kernels are bound by memory. Without scales a thread takes four elements at a time, in one access per array. With scales a
// warp takes a block of 256 elements, which have one scale.

namespace {

struct Scales {
  float* at[2];
};
struct Places {
  void* at[2];
};

constexpr int kLast = kCount > 1 ? 1 : 0;  // a rule may also keep no moments

template <class T>
struct alignas(4 * sizeof(T)) Four {
  T at[4];
};

__device__ bool all_finite(const float* norms, int64_t count) {
  for (int64_t i = 0; i < count; ++i)  // the norms of one tile's parameters: few, and the same for all threads
    if ((BITS(norms[i]) & 0x7F800000u) == 0x7F800000u) return false;
  return true;
}

// The random bits of element `number` of its parameter.
INLINE uint32_t bits_for(uint32_t key, int64_t number) {
  return kIsRandom ? random_bits(block_key(key, number), static_cast<uint32_t>(number % kBlock)) : 0u;
}

INLINE float load_moment(float value) { return value; }
INLINE float load_moment(BFloat16 value) { return load(value); }
INLINE void store_moment(float& place, float value, uint32_t) { place = canonical(value); }
INLINE void store_moment(BFloat16& place, float value, uint32_t random) { store_randomly(place, value, random); }

#if MOMENTS != 2
template <class Gradient>
INLINE void update(Weight& weight, int16_t& remainder, Gradient gradient, Moment* (&moments)[2], float scale, const Scalars& s,
                   uint32_t random) {
  float state[2];
  for (int k = 0; k < kCount; ++k) state[k] = load_moment(*moments[k]);
  float master = load_master(weight, remainder);
  apply(master, VALUE(Exact(load(gradient)) * Exact(scale)), state, s);
  store_master(weight, remainder, master, random);
  for (int k = 0; k < kCount; ++k) store_moment(*moments[k], state[k], k == 0 ? random & 0xFFFFu : random >> 16);
}

__device__ void run(Weight* weights, int16_t* remainders, const Weight* gradients, Places places, Scales, int64_t start,
                    int64_t stop, int64_t first, uint32_t key, float scale, const Scalars& s) {
  Moment* moments[2] = {};
  for (int k = 0; k < kCount; ++k) moments[k] = static_cast<Moment*>(places.at[k]) - start;
  const int64_t step = 4 * int64_t{blockDim.x} * gridDim.x;
  int64_t i = start + 4 * (int64_t{blockIdx.x} * blockDim.x + threadIdx.x);  // parameters begin on 128 bytes
  for (; i + 4 <= stop; i += step) {
    Four<Weight> w = *reinterpret_cast<Four<Weight>*>(weights + i);
    Four<int16_t> r = {};
    if (MASTER == 0) r = *reinterpret_cast<Four<int16_t>*>(remainders + i);
    const Four<Weight> g = *reinterpret_cast<const Four<Weight>*>(gradients + i);
    Four<Moment> m[2];
    for (int k = 0; k < kCount; ++k) m[k] = *reinterpret_cast<Four<Moment>*>(moments[k] + i);
    for (int e = 0; e < 4; ++e) {
      Moment* at[2] = {&m[0].at[e], &m[kLast].at[e]};
      update(w.at[e], r.at[e], g.at[e], at, scale, s, bits_for(key, first + i - start + e));
    }
    *reinterpret_cast<Four<Weight>*>(weights + i) = w;
    if (MASTER == 0) *reinterpret_cast<Four<int16_t>*>(remainders + i) = r;
    for (int k = 0; k < kCount; ++k) *reinterpret_cast<Four<Moment>*>(moments[k] + i) = m[k];
  }
  for (; i < stop; ++i) {  // one thread updates the last few
    int16_t none = 0;
    Moment* at[2] = {moments[0] + i, moments[kLast] + i};
    update(weights[i], MASTER == 0 ? remainders[i] : none, gradients[i], at, scale, s, bits_for(key, first + i - start));
  }
}
#else
constexpr int kLanes = 32, kEach = kBlock / kLanes;

__device__ void run(Weight* weights, int16_t* remainders, const Weight* gradients, Places places, Scales scales, int64_t start,
                    int64_t stop, int64_t first, uint32_t key, float scale, const Scalars& s) {
  const int lane = threadIdx.x % kLanes;
  const int64_t warps = int64_t{blockDim.x} * gridDim.x / kLanes;
  const int64_t warp = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kLanes;
  for (int64_t block = warp; start + block * kBlock < stop; block += warps) {
    const int64_t begin = start + block * kBlock;
    float values[2][kEach];
    uint32_t random[kEach], largest[2] = {0u, 0u};
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int64_t i = begin + e * kLanes + lane;
      if (i >= stop) continue;
      float state[2];
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const uint8_t code = static_cast<uint8_t*>(places.at[k])[i - start];
        state[k] = is_signed(k) ? load<true>(code, scales.at[k][block]) : load<false>(code, scales.at[k][block]);
      }
      random[e] = bits_for(key, first + i - start);
      int16_t none = 0;
      int16_t& remainder = MASTER == 0 ? remainders[i] : none;
      float master = load_master(weights[i], remainder);
      apply(master, VALUE(Exact(load(gradients[i])) * Exact(scale)), state, s);
      store_master(weights[i], remainder, master, random[e]);
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        values[k][e] = canonical(state[k]);
        const uint32_t bits = BITS(values[k][e]) & 0x7FFFFFFFu;
        largest[k] = bits > largest[k] ? bits : largest[k];
      }
    }
    __syncwarp();  // all lanes have read the scales
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
#pragma unroll
      for (int half = kLanes / 2; half > 0; half /= 2) {
        const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, largest[k], half);
        largest[k] = other > largest[k] ? other : largest[k];
      }
      if (lane == 0) scales.at[k][block] = canonical(FLOAT(largest[k]));
      const float inverse = inverse_of(largest[k]);
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const int64_t i = begin + e * kLanes + lane;
        if (i >= stop) continue;
        const uint32_t bits = (k == 0 ? random[e] : random[e] >> 16) & 0xFFFFu;
        static_cast<uint8_t*>(places.at[k])[i - start] =
            is_signed(k) ? stored<true>(values[k][e], inverse, bits) : stored<false>(values[k][e], inverse, bits);
      }
    }
    __syncwarp();
  }
}
#endif

}  // namespace

// Launches take numbers, addresses and structures of these.
struct Numbers {
  float at[12];
};

extern "C" __global__ void update_elements(Weight* weights, int16_t* remainders, const Weight* gradients, void* first_moment,
                                           void* second_moment, float* first_scales, float* second_scales, float scale,
                                           const float* norms, int64_t norm_count, int32_t* kept, int64_t start, int64_t stop,
                                           int64_t first, uint32_t key, Numbers numbers) {
  if (!all_finite(norms, norm_count)) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *kept = 1;
    return;
  }
  Scalars scalars;
  static_assert(sizeof scalars <= sizeof numbers, "a rule has too many scalars");
  memcpy(&scalars, &numbers, sizeof scalars);
  run(weights, remainders, gradients, Places{{first_moment, second_moment}}, Scales{{first_scales, second_scales}}, start, stop,
      first, key, scale, scalars);
}
