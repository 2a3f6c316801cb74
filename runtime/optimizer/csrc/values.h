// How numbers are stored: one source for every processor, so that a tile may be updated on the host or on the device and
// get the same bits. Included by host.cpp and update.cpp, and put before update.cu by device_update.py.
//
// The including file defines INLINE, the bit casts BITS(float) and FLOAT(uint32_t), and the type Exact: an FP32 number
// made from a float, whose + - * /, FMA(a, b, c) and SQRT(x) round once, to nearest, and keep denormals; VALUE(x) is its
// float.
#pragma once

struct BFloat16 {
  uint16_t bits;
};

constexpr float kLargest = 3.40282346638528859812e+38f;  // finite

INLINE float canonical(float value) { return value == value ? value : FLOAT(0x7FC00000u); }

INLINE float load(float value) { return value; }
INLINE float load(BFloat16 value) { return FLOAT(uint32_t{value.bits} << 16); }

INLINE float magnitude(float value) { return FLOAT(BITS(value) & 0x7FFFFFFFu); }
INLINE float power_of_two(int32_t exponent) { return FLOAT(static_cast<uint32_t>(127 + exponent) << 23); }

// ---- masters ------------------------------------------------------------------------------------------------------

// The FP32 master of a bf16 weight: bits = (hi << 16) + remainder, hi the master rounded to nearest, ties away from
// zero. Half of every binade would not fit the remainder if ties went to even. The rounding carries like integers do:
// the largest finite masters have hi = inf and a negative remainder, and join exactly. A NaN would carry into inf or
// -0 on the device, so it is stored as the canonical NaN with remainder 0.
INLINE float join_master(BFloat16 hi, int16_t remainder) {
  return FLOAT((uint32_t{hi.bits} << 16) + static_cast<uint32_t>(int32_t{remainder}));
}
INLINE void split_master(BFloat16& hi, int16_t& remainder, float master) {
  const uint32_t bits = BITS(canonical(master));
  hi.bits = static_cast<uint16_t>((bits + 0x8000u) >> 16);
  remainder = static_cast<int16_t>(bits & 0xFFFFu);  // bits - (hi << 16): the low half, read as signed
}

// ---- random bits --------------------------------------------------------------------------------------------------

// Random bits are a hash of a key (of the parameter and the step) and of an element's number in its parameter. They are
// the same wherever, whenever and in whatever order elements are updated. The mixing function: C. Wellons, "Prospecting
// for hash functions", lowbias32.
constexpr int64_t kBlock = 256;  // elements whose number has the same high bits; also those that share a scale

INLINE uint32_t mixed(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}
INLINE uint32_t block_key(uint32_t key, int64_t number) { return mixed(key + static_cast<uint32_t>(number / kBlock)); }
INLINE uint32_t random_bits(uint32_t block_key, uint32_t lane) { return mixed(block_key + lane * 0x9E3779B9u); }

// To one of the two nearest bf16 numbers, to each with the probability that makes the mean right. `random`: 16 bits.
INLINE void store_randomly(BFloat16& place, float value, uint32_t random) {
  const uint32_t bits = BITS(canonical(value));
  const bool is_special = (bits & 0x7F800000u) == 0x7F800000u;
  place.bits = static_cast<uint16_t>((is_special ? bits : bits + random) >> 16);
}

// ---- eight bits ---------------------------------------------------------------------------------------------------

// Numbers from 0 to 1 in a dynamic map (Dettmers et al., "8-bit optimizers via block-wise quantization", 2022): level e
// has 2^e numbers at equal distances in (8^(e-L-1), 8^(e-L)], and code 2^e + j is the j-th, so that codes ascend. A level
// spans a factor of 8, where it is 10 in the paper, so that it is found in a float's exponent. Code 0 is 0, and the last
// code is 1: the largest number of a block is stored exactly. A map of moments of both signs has L = 6 and the sign in the
// highest bit; one of moments that are never negative has L = 7.
constexpr float kLowest = 0.125f, kSpan = 0.875f, kPerSpan = 8.0f / 7.0f;

template <int L>
INLINE float decoded(uint32_t code) {
  const uint32_t bits = BITS(static_cast<float>(static_cast<int32_t>(code)));
  const int32_t level = static_cast<int32_t>(bits >> 23) - 127;
  const float fraction = FLOAT((bits & 0x7FFFFFu) | 0x3F800000u) - 1.0f;
  const Exact number = FMA(Exact(kSpan), Exact(fraction + power_of_two(-level)), Exact(kLowest));
  return code == 0 ? 0.0f : VALUE(number * Exact(power_of_two(3 * (level - L))));
}

// One of the two nearest codes, so that the mean is right. The code below a level's first one is the last of the level
// before. `random`: from 0 to 1, without 1.
template <int L>
INLINE uint32_t encoded(float number, float random) {
  const int32_t exponent = static_cast<int32_t>((BITS(number) >> 23) & 0xFFu) - 127;
  const int32_t below = exponent < -1 ? -1 - exponent : 0;
  const int32_t thirds = static_cast<int32_t>((static_cast<uint32_t>(below) * 0xAAABu) >> 17);
  const int32_t down = thirds < L ? thirds : L, level = L - down;
  const float count = power_of_two(level);
  const Exact place = FMA(Exact(number) * Exact(power_of_two(3 * down)) - Exact(kLowest), Exact(count) * Exact(kPerSpan),
                          Exact(random));
  float at = VALUE(place) > 0.0f ? VALUE(place) : 0.0f;
  at = at < count ? at : count;  // a number may be an ulp above 1
  return static_cast<uint32_t>((1 << level) - 1 + static_cast<int32_t>(at));
}

template <bool is_signed>
INLINE float load(uint8_t code, float scale) {
  if (!is_signed) return VALUE(Exact(decoded<7>(code)) * Exact(scale));
  const float value = VALUE(Exact(decoded<6>(code & 127u)) * Exact(scale));
  return FLOAT(BITS(value) | (uint32_t{code} & 128u) << 24);
}

// `inverse`: 1 / scale. A second moment is never stored as 0 unless it is 0: an update divides by its root. Positive numbers
// are compared as bits: the device flushes denormals to zero before it compares numbers.
template <bool is_signed>
INLINE uint8_t stored(float value, float inverse, uint32_t random) {
  const float number = VALUE(Exact(magnitude(value)) * Exact(inverse));
  const float chance = VALUE(Exact(static_cast<float>(static_cast<int32_t>(random))) * Exact(1.0f / 65536.0f));
  if (!is_signed) {
    const uint32_t code = encoded<7>(number, chance);
    return static_cast<uint8_t>(BITS(number) == 0u ? 0u : code == 0u ? 1u : code);
  }
  constexpr float kFirst = 1.0f / 262144.0f;  // the value of code 1
  const uint32_t small = BITS(VALUE(Exact(chance) * Exact(kFirst))) < BITS(number) ? 1u : 0u;
  return static_cast<uint8_t>((BITS(number) < BITS(kFirst) ? small : encoded<6>(number, chance)) | (BITS(value) >> 31) << 7);
}

// The scale of a block from the largest magnitude in it, and what values are multiplied with.
INLINE float inverse_of(uint32_t largest) {
  const bool divides = largest != 0u && largest < 0x7F800000u;
  return divides ? VALUE(Exact(1.0f) / Exact(FLOAT(largest))) : 0.0f;
}
