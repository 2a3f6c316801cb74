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
template <int L>
INLINE float decoded(uint32_t code) {
  // (number + 1) 4^level 7/8 - 8^level 6/8, over 8^L, where 2^level is the exponent of the number: in the fewest operations.
  const float number = static_cast<float>(static_cast<int32_t>(code));
  const uint32_t level = BITS(number) & 0x7F800000u;
  const uint32_t twice = 2u * level - (uint32_t{127 + 3 * L} << 23);
  const Exact quarters(FLOAT(twice)), eighths(FLOAT(twice + level - (127u << 23)));
  const Exact value = FMA(quarters * Exact(number + 1.0f), Exact(0.875f), eighths * Exact(-0.75f));
  return code == 0u ? 0.0f : VALUE(value);
}

// One of the two nearest codes, so that the mean is right. The code below a level's first one is the last of the level
// before. `number`: from 0 to 1, without 1. `random`: 16 bits. Below the lowest level, a number that is signed is 0 or code
// 1, and others are code 1.
template <int L, bool is_signed>
INLINE int32_t encoded(float number, uint32_t random) {
  constexpr int32_t kBelow = 3 * L - 1;
  constexpr float kRound = 12582912.0f;  // a number that is added to this is rounded, in the low bits
  const int32_t exponents = 125 - static_cast<int32_t>(BITS(number) >> 23), below = exponents < kBelow ? exponents : kBelow;
  const uint32_t down = BITS(VALUE(FMA(Exact(static_cast<float>(below)), Exact(1.0f / 3.0f), Exact(kRound)))) << 23;
  const float count = FLOAT((uint32_t{127 + L} << 23) - down);
  const Exact place = Exact(number) * Exact(FLOAT((uint32_t{127 + L} << 23) + 2u * down));
  // Chances are from 2^-13 to 1 - 2^-13, so that the largest number, which may be an ulp below 1, always has the last code.
  constexpr float kStep = 4095.0f / 4096.0f / 65536.0f, kFirst = 1.0f / 8192.0f;
  const Exact bits(static_cast<float>(static_cast<int32_t>(random)));
  const float code = VALUE(FMA(place, Exact(8.0f / 7.0f),
                               FMA(Exact(count), Exact(6.0f / 7.0f), FMA(bits, Exact(kStep), Exact(kFirst - 1.0f)))));
  if (!is_signed) return static_cast<int32_t>(code);
  const float small = VALUE(place + FMA(bits, Exact(kStep), Exact(kFirst)));
  return static_cast<int32_t>(exponents < kBelow ? code : small);
}

template <bool is_signed>
INLINE float load(uint8_t code, float scale) {
  if (!is_signed) return VALUE(Exact(decoded<7>(code)) * Exact(scale));
  const float value = VALUE(Exact(decoded<6>(code & 127u)) * Exact(scale));
  return FLOAT(BITS(value) | (uint32_t{code} & 128u) << 24);
}

// `inverse`: 1 / scale. A second moment is never stored as 0 unless it is 0: an update divides by its root. NaN is stored as
// the largest number. Numbers are compared as unsigned integers: the device flushes denormals to zero where it compares
// floats, and infinity times 0 has the sign bit on the host alone.
template <bool is_signed>
INLINE uint8_t stored(float value, float inverse, uint32_t random) {
  constexpr uint32_t kMost = 0x3F7FFFFFu;  // the largest number below 1
  const uint32_t product = BITS(VALUE(Exact(magnitude(value)) * Exact(inverse)));
  const float number = FLOAT(product < kMost ? product : kMost);
  if (is_signed)
    return static_cast<uint8_t>(static_cast<uint32_t>(encoded<6, true>(number, random)) | (BITS(value) >> 24 & 128u));
  const int32_t code = encoded<7, false>(number, random);
  return static_cast<uint8_t>(BITS(number) == 0u ? 0 : code > 1 ? code : 1);
}

// The scale of a block from the largest magnitude in it, and what values are multiplied with.
INLINE float inverse_of(uint32_t largest) {
  const bool divides = largest != 0u && largest < 0x7F800000u;
  return divides ? VALUE(Exact(1.0f) / Exact(FLOAT(largest))) : 0.0f;
}
