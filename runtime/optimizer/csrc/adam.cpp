// Optimizer kernels over host memory: AdamW, gradient norm, gradient accumulation, FP32 master split and join, copy.
// A plain C ABI, built and loaded by native.py. Sizes are int64 counts of elements; pointers need only the alignment
// of their type, but run fastest on 64 bytes.
//
// Every kernel gives the same bits for any number of threads and any instruction set, because
//   - each loop is written once, as scalar code, and compiled for every instruction set; build with
//     -ffp-contract=off and without -ffast-math, so that only the fused multiply-adds written here exist;
//   - work is cut into chunks whose bounds depend on sizes alone, and partial sums are added in their order;
//   - every NaN that is stored is the canonical one: which operand's payload survives is the compiler's choice;
//   - the floating-point environment is reset, so that a caller's flush-to-zero mode reaches no thread or all.
#include <cfenv>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace {

ALWAYS_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

ALWAYS_INLINE float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

#define INLINE ALWAYS_INLINE
#define BITS bits_of
#define FLOAT float_of
#define Exact float  // exact through the build's flags and the floating-point environment
#define FMA __builtin_fmaf
#define SQRT __builtin_sqrtf
#define VALUE(number) (number)
#include "adamw.h"

enum DType : int { kFloat32 = 0, kBFloat16 = 1 };
enum InstructionSet : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

constexpr int64_t kChunk = 16384;  // elements; also the shape of the norm's partial sums, so a part of its result
constexpr int kNormLanes = 32;     // independent sums within a chunk: four vectors of AVX-512, eight of AVX2
constexpr int64_t kBlock = 64;     // elements between prefetches, a multiple of kNormLanes
constexpr int64_t kPrefetch = 1024;  // elements ahead
constexpr int64_t kCopyChunk = int64_t{1} << 20;  // bytes

// ---- values -------------------------------------------------------------------------------------------------------

ALWAYS_INLINE void store(float& place, float value) { place = canonical(value); }
ALWAYS_INLINE void store(BFloat16& place, float value) {  // nearest, ties to even
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  place.bits = static_cast<uint16_t>(value == value ? rounded : 0x7FC0u);
}

// ---- instruction sets and threads ---------------------------------------------------------------------------------

template <class Loop>
void run_portable(const Loop& loop, int64_t begin, int64_t end) {
  loop(begin, end);
}
#if defined(__x86_64__)
template <class Loop>
__attribute__((target("avx2,fma"))) void run_avx2(const Loop& loop, int64_t begin, int64_t end) {
  loop(begin, end);
}
template <class Loop>
__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"))) void run_avx512(const Loop& loop, int64_t begin,
                                                                                       int64_t end) {
  loop(begin, end);
}
#endif

// Loops are structs whose operator() is always inlined: that is how one source is compiled for every instruction set.
template <class Loop>
void run(int instruction_set, const Loop& loop, int64_t begin, int64_t end) {
#if defined(__x86_64__)
  if (instruction_set == kAvx512) return run_avx512(loop, begin, end);
  if (instruction_set == kAvx2) return run_avx2(loop, begin, end);
#endif
  (void)instruction_set;
  run_portable(loop, begin, end);
}

// Prefetches the block kPrefetch elements ahead; past an array's end that is harmless. The processors' own prefetchers
// stop at every 4 KiB: this makes AdamW 8% and the norm 38% faster on all cores of a Xeon.
template <class T>
ALWAYS_INLINE void prefetch_block(const T* place) {
  const uintptr_t ahead = reinterpret_cast<uintptr_t>(place) + kPrefetch * sizeof(T);
  for (uintptr_t offset = 0; offset < kBlock * sizeof(T); offset += 64)
    __builtin_prefetch(reinterpret_cast<const void*>(ahead + offset));
}

// Default rounding, no flush-to-zero, for one thread and one scope. OpenMP workers have modes of their own.
class DefaultFloatingPoint {
 public:
  DefaultFloatingPoint() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatingPoint() { std::fesetenv(&saved_); }
  DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
  DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;

 private:
  std::fenv_t saved_;
};

int64_t chunks_of(int64_t count, int64_t chunk) { return (count + chunk - 1) / chunk; }

template <class Task>
void for_each_chunk(int64_t chunks, int threads, const Task& task) {
  const int team = chunks < threads ? static_cast<int>(chunks) : threads;
#pragma omp parallel num_threads(team) if (team > 1)
  {
    DefaultFloatingPoint environment;
    // dynamic: a core that is busy with other threads takes fewer chunks. nowait: the region's end is barrier enough.
#pragma omp for schedule(dynamic) nowait
    for (int64_t index = 0; index < chunks; ++index) task(index);
  }
}

template <class Loop>
void run_all(int64_t count, int instruction_set, int threads, const Loop& loop) {
  for_each_chunk(chunks_of(count, kChunk), threads, [&](int64_t index) {
    const int64_t begin = index * kChunk;
    run(instruction_set, loop, begin, begin + kChunk < count ? begin + kChunk : count);
  });
}

// ---- AdamW --------------------------------------------------------------------------------------------------------

// Which part of an update is stored: all of it, or the weights, which the next forward needs, and the moments later. Each
// part computes the whole update, so that both together give the same bits.
enum Part : int { kWhole = 0, kWeights = 1, kMoments = 2 };

template <class Weight, class Gradient, Part part>
struct AdamWLoop {
  Weight* weights;
  int16_t* remainders;
  const Gradient* gradients;
  float *first_moments, *second_moments;
  float gradient_scale;
  Segment segment;

  ALWAYS_INLINE void operator()(int64_t begin, int64_t end) const {
    constexpr bool is_split = sizeof(Weight) == sizeof(BFloat16);
    const Segment s = segment;
    const float scale = gradient_scale;
    Weight* const w = weights;
    int16_t* const r = remainders;
    const Gradient* const g = gradients;
    float *const ms = first_moments, *const vs = second_moments;
    int16_t unused = 0;
    for (int64_t block = begin; block < end; block += kBlock) {
      if (part != kMoments) prefetch_block(w + block);
      if (part != kMoments && is_split) prefetch_block(r + block);
      prefetch_block(g + block);
      prefetch_block(ms + block);
      prefetch_block(vs + block);
      const int64_t stop = block + kBlock < end ? block + kBlock : end;
#pragma GCC ivdep
      for (int64_t i = block; i < stop; ++i) {
        if (part == kWhole) {
          update(w[i], is_split ? r[i] : unused, g[i], ms[i], vs[i], scale, s);
        } else if (part == kWeights) {
          float first = ms[i], second = vs[i];
          update(w[i], is_split ? r[i] : unused, g[i], first, second, scale, s);
        } else {
          Weight none{};
          update(none, unused, g[i], ms[i], vs[i], scale, s);
        }
      }
    }
  }
};

template <class Weight, class Gradient, Part part>
void adamw(void* weights, int16_t* remainders, const void* gradients, float* m, float* v, const Segment* segments,
           int64_t segment_count, float gradient_scale, int instruction_set, int threads) {
  int64_t chunks = 0;
  for (int64_t s = 0; s < segment_count; ++s) chunks += chunks_of(segments[s].stop - segments[s].start, kChunk);
  for_each_chunk(chunks, threads, [&](int64_t index) {
    // Chunks start where their segment starts, and parameters are aligned: so vectors stay aligned.
    const Segment* segment = segments;
    for (; index >= chunks_of(segment->stop - segment->start, kChunk); ++segment)
      index -= chunks_of(segment->stop - segment->start, kChunk);
    const int64_t begin = segment->start + index * kChunk;
    const int64_t end = begin + kChunk < segment->stop ? begin + kChunk : segment->stop;
    run(instruction_set,
        AdamWLoop<Weight, Gradient, part>{static_cast<Weight*>(weights), remainders, static_cast<const Gradient*>(gradients),
                                    m, v, gradient_scale, *segment},
        begin, end);
  });
}

// ---- the other loops ----------------------------------------------------------------------------------------------

template <class Gradient>
struct SquaredNormLoop {
  const Gradient* gradients;
  double* partials;  // one a chunk

  static ALWAYS_INLINE void add_square(double& sum, double value) { sum += value * value; }  // a float's is exact

  ALWAYS_INLINE void operator()(int64_t begin, int64_t end) const {
    double lanes[kNormLanes] = {};
    for (int64_t block = begin; block < end; block += kBlock) {
      prefetch_block(gradients + block);
      const int64_t stop = block + kBlock < end ? block + kBlock : end;
      int64_t i = block;
      for (; i + kNormLanes <= stop; i += kNormLanes)
        for (int lane = 0; lane < kNormLanes; ++lane) add_square(lanes[lane], load(gradients[i + lane]));
      for (int lane = 0; i < stop; ++i, ++lane) add_square(lanes[lane], load(gradients[i]));
    }
    double sum = 0.0;
    for (double lane : lanes) sum += lane;
    partials[begin / kChunk] = sum;
  }
};

template <class Destination, class Source>
struct AccumulateLoop {
  Destination* destination;
  const Source* source;
  bool overwrite;

  ALWAYS_INLINE void operator()(int64_t begin, int64_t end) const {
    Destination* const to = destination;
    const Source* const from = source;
    if (overwrite) {
#pragma GCC ivdep
      for (int64_t i = begin; i < end; ++i) store(to[i], load(from[i]));
    } else {
#pragma GCC ivdep
      for (int64_t i = begin; i < end; ++i) store(to[i], load(to[i]) + load(from[i]));
    }
  }
};

struct SplitLoop {
  const float* master;
  BFloat16* hi;
  int16_t* remainder;

  ALWAYS_INLINE void operator()(int64_t begin, int64_t end) const {
    const float* const from = master;
    BFloat16* const h = hi;
    int16_t* const r = remainder;
#pragma GCC ivdep
    for (int64_t i = begin; i < end; ++i) store_master(h[i], r[i], from[i]);
  }
};

struct JoinLoop {
  const BFloat16* hi;
  const int16_t* remainder;
  float* master;

  ALWAYS_INLINE void operator()(int64_t begin, int64_t end) const {
    const BFloat16* const h = hi;
    const int16_t* const r = remainder;
    float* const to = master;
#pragma GCC ivdep
    for (int64_t i = begin; i < end; ++i) to[i] = load_master(h[i], r[i]);
  }
};

// A store that first reads its cache line costs a third of a copy's bandwidth: use streaming stores.
void copy_bytes(char* destination, const char* source, int64_t bytes) {
#if defined(__SSE2__)
  const int64_t head = -reinterpret_cast<intptr_t>(destination) & 63;
  if (head < bytes) {
    std::memcpy(destination, source, static_cast<size_t>(head));
    destination += head, source += head, bytes -= head;
    for (; bytes >= 64; destination += 64, source += 64, bytes -= 64)
      for (int part = 0; part < 64; part += 16)
        _mm_stream_si128(reinterpret_cast<__m128i*>(destination + part),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + part)));
    _mm_sfence();
  }
#endif
  std::memcpy(destination, source, static_cast<size_t>(bytes));
}

}  // namespace

// ---- the C ABI ----------------------------------------------------------------------------------------------------

extern "C" {

int megacompile_best_instruction_set() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return kAvx512;
  if (avx2) return kAvx2;
#endif
  return kPortable;
}

int64_t megacompile_chunk_elements() { return kChunk; }

// `remainders` is null for FP32 weights, and makes them bf16 otherwise. `part`: what is stored.
void megacompile_adamw(void* weights, int16_t* remainders, const void* gradients, int gradient_dtype, float* m,
                       float* v, const Segment* segments, int64_t segment_count, float gradient_scale, int part,
                       int instruction_set, int threads) {
  const auto store = [&](auto chosen) {
    constexpr Part stored = decltype(chosen)::value;
    const auto kernel =
        remainders ? (gradient_dtype == kBFloat16 ? adamw<BFloat16, BFloat16, stored> : adamw<BFloat16, float, stored>)
                   : (gradient_dtype == kBFloat16 ? adamw<float, BFloat16, stored> : adamw<float, float, stored>);
    kernel(weights, remainders, gradients, m, v, segments, segment_count, gradient_scale, instruction_set, threads);
  };
  if (part == kWeights) return store(std::integral_constant<Part, kWeights>{});
  if (part == kMoments) return store(std::integral_constant<Part, kMoments>{});
  store(std::integral_constant<Part, kWhole>{});
}

// `partials` is scratch: one double a chunk.
double megacompile_squared_norm(const void* gradients, int dtype, int64_t count, double* partials, int instruction_set,
                                int threads) {
  if (dtype == kBFloat16)
    run_all(count, instruction_set, threads,
            SquaredNormLoop<BFloat16>{static_cast<const BFloat16*>(gradients), partials});
  else
    run_all(count, instruction_set, threads, SquaredNormLoop<float>{static_cast<const float*>(gradients), partials});
  DefaultFloatingPoint environment;
  double sum = 0.0;
  for (int64_t chunk = 0; chunk < chunks_of(count, kChunk); ++chunk) sum += partials[chunk];
  return sum;
}

void megacompile_accumulate(void* destination, int destination_dtype, const void* source, int source_dtype,
                            int64_t count, int overwrite, int instruction_set, int threads) {
  const auto accumulate = [&](auto* to, const auto* from) {
    using Destination = std::remove_reference_t<decltype(*to)>;
    using Source = std::remove_cv_t<std::remove_reference_t<decltype(*from)>>;
    run_all(count, instruction_set, threads, AccumulateLoop<Destination, Source>{to, from, overwrite != 0});
  };
  const auto accumulate_into = [&](auto* to) {
    if (source_dtype == kBFloat16)
      accumulate(to, static_cast<const BFloat16*>(source));
    else
      accumulate(to, static_cast<const float*>(source));
  };
  if (destination_dtype == kBFloat16)
    accumulate_into(static_cast<BFloat16*>(destination));
  else
    accumulate_into(static_cast<float*>(destination));
}

void megacompile_split(const float* master, void* hi, int16_t* remainder, int64_t count, int instruction_set,
                       int threads) {
  run_all(count, instruction_set, threads, SplitLoop{master, static_cast<BFloat16*>(hi), remainder});
}

void megacompile_join(const void* hi, const int16_t* remainder, float* master, int64_t count, int instruction_set,
                      int threads) {
  run_all(count, instruction_set, threads, JoinLoop{static_cast<const BFloat16*>(hi), remainder, master});
}

void megacompile_copy(void* destination, const void* source, int64_t bytes, int threads) {
  for_each_chunk(chunks_of(bytes, kCopyChunk), threads, [&](int64_t index) {
    const int64_t begin = index * kCopyChunk;
    const int64_t end = begin + kCopyChunk < bytes ? begin + kCopyChunk : bytes;
    copy_bytes(static_cast<char*>(destination) + begin, static_cast<const char*>(source) + begin, end - begin);
  });
}

// Takes the pages of memory that is in use: values stay. A write fault, unlike madvise(MADV_POPULATE_WRITE), does not keep
// the process's other threads from mapping memory.
void megacompile_touch(void* memory, int64_t bytes, int64_t page) {
  for (int64_t offset = 0; offset < bytes; offset += page)
    __atomic_fetch_add(static_cast<volatile char*>(memory) + offset, 0, __ATOMIC_RELAXED);
}

}  // extern "C"
