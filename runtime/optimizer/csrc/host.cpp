// Kernels over host memory besides the update (update.cpp): gradient norm, gradient accumulation, FP32 master split and
// join, copy. A plain C ABI, built and loaded by native.py. Sizes are int64 counts of elements; pointers need only the
// alignment of their type, but run fastest on 64 bytes.
//
// Every kernel gives the same bits for any number of threads and any instruction set, because
//   - each loop is written once, as scalar code, and compiled for every instruction set; build with
//     -ffp-contract=off and without -ffast-math, so that only the fused multiply-adds written here exist;
//   - work is cut into chunks whose bounds depend on sizes alone, and partial sums are added in their order;
//   - every NaN that is stored is the canonical one: which operand's payload survives is the compiler's choice;
//   - the floating-point environment is reset, so that a caller's flush-to-zero mode reaches no thread or all.
#include "execution.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

#include "values.h"

constexpr int kNormLanes = 32;       // independent sums within a chunk: four vectors of AVX-512, eight of AVX2
constexpr int64_t kNormBlock = 64;   // elements between prefetches, a multiple of kNormLanes
constexpr int64_t kCopyChunk = int64_t{1} << 20;  // bytes

ALWAYS_INLINE void store(float& place, float value) { place = canonical(value); }
ALWAYS_INLINE void store(BFloat16& place, float value) {  // nearest, ties to even
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  place.bits = static_cast<uint16_t>(value == value ? rounded : 0x7FC0u);
}

template <class Loop>
void run_all(int64_t count, int instruction_set, int threads, const Loop& loop) {
  for_each_chunk(chunks_of(count, kChunk), threads, [&](int64_t index) {
    const int64_t begin = index * kChunk;
    run(instruction_set, loop, begin, begin + kChunk < count ? begin + kChunk : count);
  });
}

template <class Gradient>
struct SquaredNormLoop {
  const Gradient* gradients;
  double* partials;  // one a chunk

  static ALWAYS_INLINE void add_square(double& sum, double value) { sum += value * value; }  // a float's is exact

  ALWAYS_INLINE void operator()(int64_t begin, int64_t end) const {
    double lanes[kNormLanes] = {};
    for (int64_t block = begin; block < end; block += kNormBlock) {
      prefetch(gradients + block, kNormBlock);
      const int64_t stop = block + kNormBlock < end ? block + kNormBlock : end;
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
    for (int64_t i = begin; i < end; ++i) split_master(h[i], r[i], from[i]);
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
    for (int64_t i = begin; i < end; ++i) to[i] = join_master(h[i], r[i]);
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
