// Updates elements in host memory by the rule of an optimizer, in one pass over memory. Built and loaded by native.py for
// one rule and one way to store state, which the text before this file defines:
//
//   MASTER    0: bf16 weights with an exact FP32 master (values.h); 1: FP32 weights; 2: bf16 weights alone
//   MOMENTS   0: FP32; 1: bf16; 2: eight bits, with an FP32 scale for each block of 256 elements
//   Scalars, kCount, is_signed(k), apply(master, gradient, moments, scalars)
//
// execution.h, values.h, these definitions and element.h come before it. What host.cpp says about bits holds here too.

namespace {

enum Part : int { kWhole = 0, kWeights = 1, kMoments = 2 };

constexpr int kMostMoments = 2, kMostScalars = 12;

struct Segment {           // kernels.NativeSegment mirrors it
  int64_t start, stop;     // elements of the tile
  int64_t first;           // the number of the first in its parameter
  void* moments[kMostMoments];  // those of the element `start`
  float* scales[kMostMoments];  // eight bits: that of its block, which begins there
  uint32_t key;            // of random bits
  float scalars[kMostScalars];
};

constexpr int64_t kRun = kIsRandom ? kBlock : 64;  // elements between prefetches; blocks begin at multiples in a parameter

// Each part computes the whole update, so that weights and moments apart give the same bits as both together. What is not
// stored, the compiler leaves out.
template <class Gradient, Part part>
struct UpdateLoop {
  Weight* weights;
  int16_t* remainders;
  const Gradient* gradients;
  float gradient_scale;
  Segment segment;

  ALWAYS_INLINE void operator()(int64_t begin, int64_t end) const {
    // The compiler keeps local copies in registers. It would read members again after every store of an element.
    const Segment at = segment;
    Scalars scalars;
    static_assert(sizeof scalars <= sizeof at.scalars);
    std::memcpy(&scalars, at.scalars, sizeof scalars);
    const int64_t number = at.first + (begin - at.start);
    int64_t stop = begin + (kIsRandom ? kRun - number % kRun : kRun);
    for (int64_t block = begin; block < end; block = stop, stop += kRun)
      update(at, scalars, block, stop < end ? stop : end, at.first + (block - at.start));
  }

  ALWAYS_INLINE void update(const Segment& at, const Scalars& scalars, int64_t begin, int64_t end, int64_t number) const {
    const float scale = gradient_scale;
    Weight* const w = weights;
    int16_t* const r = remainders;
    const Gradient* const g = gradients;
    Moment* moments[kMostMoments];
    for (int k = 0; k < kCount; ++k) moments[k] = static_cast<Moment*>(at.moments[k]) - at.start;
    if (part != kMoments) prefetch(w + begin, kRun);
    if (part != kMoments && MASTER == 0) prefetch(r + begin, kRun);
    prefetch(g + begin, kRun);
    for (int k = 0; k < kCount; ++k) prefetch(moments[k] + begin, kRun);
    const uint32_t key = kIsRandom ? block_key(at.key, number) : 0;
    const uint32_t lane = static_cast<uint32_t>(number % kBlock) - static_cast<uint32_t>(begin);
    int16_t unused = 0;
#if MOMENTS == 2
    alignas(64) float values[kMostMoments][kBlock];
    alignas(64) uint32_t noise[kBlock];
    uint32_t largest[kMostMoments] = {};
    const int64_t in_scales = (begin - at.start) / kBlock;
    float scales[kMostMoments];
    for (int k = 0; k < kCount; ++k) scales[k] = at.scales[k][in_scales];
#endif
#pragma GCC ivdep
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t random = kIsRandom ? random_bits(key, lane + static_cast<uint32_t>(i)) : 0;
      float state[kMostMoments];
#if MOMENTS == 2
      for (int k = 0; k < kCount; ++k)
        state[k] = is_signed(k) ? load<true>(moments[k][i], scales[k]) : load<false>(moments[k][i], scales[k]);
#else
      for (int k = 0; k < kCount; ++k) state[k] = load(moments[k][i]);
#endif
      float master = part == kMoments ? 0.0f : load_master(w[i], MASTER == 0 ? r[i] : unused);
      apply(master, load(g[i]) * scale, state, scalars);
      if (part != kMoments) store_master(w[i], MASTER == 0 ? r[i] : unused, master, random);
      if (part == kWeights) continue;
#if MOMENTS == 0
      for (int k = 0; k < kCount; ++k) moments[k][i] = canonical(state[k]);
#elif MOMENTS == 1
      for (int k = 0; k < kCount; ++k) store_randomly(moments[k][i], state[k], k == 0 ? random & 0xFFFFu : random >> 16);
#else
      for (int k = 0; k < kCount; ++k) {
        const float value = canonical(state[k]);
        const uint32_t bits = bits_of(value) & 0x7FFFFFFFu;
        values[k][i - begin] = value;
        largest[k] = bits > largest[k] ? bits : largest[k];
      }
      noise[i - begin] = random;
#endif
    }
#if MOMENTS == 2
    if (part != kWeights)
      for (int k = 0; k < kCount; ++k)
        encode(k, values[k], noise, largest[k], moments[k] + begin, at.scales[k][in_scales], end - begin);
#endif
  }

#if MOMENTS == 2
  static ALWAYS_INLINE void encode(int k, const float* values, const uint32_t* noise, uint32_t largest, uint8_t* codes, float& scale,
                                   int64_t count) {
    scale = canonical(float_of(largest));
    const float inverse = inverse_of(largest);
    const int shift = k == 0 ? 0 : 16;
    if (is_signed(k)) {
#pragma GCC ivdep
      for (int64_t i = 0; i < count; ++i) codes[i] = stored<true>(values[i], inverse, noise[i] >> shift & 0xFFFFu);
    } else {
#pragma GCC ivdep
      for (int64_t i = 0; i < count; ++i) codes[i] = stored<false>(values[i], inverse, noise[i] >> shift & 0xFFFFu);
    }
  }
#endif
};

template <class Gradient, Part part>
void update_all(void* weights, int16_t* remainders, const void* gradients, const Segment* segments, int64_t segment_count,
                float gradient_scale, int instruction_set, int threads) {
  int64_t chunks = 0;
  for (int64_t s = 0; s < segment_count; ++s) chunks += chunks_of(segments[s].stop - segments[s].start, kChunk);
  for_each_chunk(chunks, threads, [&](int64_t index) {
    // Chunks start where their segment starts, and parameters are aligned: so vectors stay aligned, and blocks whole.
    const Segment* segment = segments;
    for (; index >= chunks_of(segment->stop - segment->start, kChunk); ++segment)
      index -= chunks_of(segment->stop - segment->start, kChunk);
    const int64_t begin = segment->start + index * kChunk;
    const int64_t end = begin + kChunk < segment->stop ? begin + kChunk : segment->stop;
    run(instruction_set,
        UpdateLoop<Gradient, part>{static_cast<Weight*>(weights), remainders, static_cast<const Gradient*>(gradients),
                                   gradient_scale, *segment},
        begin, end);
  });
}

}  // namespace

extern "C" {

// `remainders` is null but for MASTER 0. `part`: what is stored.
void megacompile_update(void* weights, int16_t* remainders, const void* gradients, int gradient_dtype,
                        const Segment* segments, int64_t segment_count, float gradient_scale, int part, int instruction_set,
                        int threads) {
  const auto store = [&](auto chosen) {
    constexpr Part stored_part = decltype(chosen)::value;
    const auto kernel = gradient_dtype == kBFloat16 ? update_all<BFloat16, stored_part> : update_all<float, stored_part>;
    kernel(weights, remainders, gradients, segments, segment_count, gradient_scale, instruction_set, threads);
  };
  if (part == kWeights) return store(std::integral_constant<Part, kWeights>{});
  if (part == kMoments) return store(std::integral_constant<Part, kMoments>{});
  store(std::integral_constant<Part, kWhole>{});
}

}  // extern "C"
