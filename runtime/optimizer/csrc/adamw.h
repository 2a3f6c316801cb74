// One element's AdamW update, and how values are stored: one source for every processor, so that a tile may be updated
// on the host or on the device and get the same bits. Included by adam.cpp, and put before adam.cu by device_adam.py.
//
// The including file defines INLINE, the bit casts BITS(float) and FLOAT(uint32_t), and the type Exact: an FP32 number
// made from a float, whose + - * /, FMA(a, b, c) and SQRT(x) round once, to nearest, and keep denormals; VALUE(x) is its
// float.
#pragma once

struct BFloat16 {
  uint16_t bits;
};

INLINE float canonical(float value) { return value == value ? value : FLOAT(0x7FC00000u); }

INLINE float load(float value) { return value; }
INLINE float load(BFloat16 value) { return FLOAT(uint32_t{value.bits} << 16); }

// The FP32 master of a bf16 weight: bits = (hi << 16) + remainder, hi the master rounded to nearest, ties away from
// zero. Half of every binade would not fit the remainder if ties went to even. The rounding carries like integers do:
// the largest finite masters have hi = inf and a negative remainder, and join exactly. A NaN would carry into inf or
// -0 on the device, so it is stored as the canonical NaN with remainder 0.
INLINE float load_master(float weight, int16_t) { return weight; }
INLINE float load_master(BFloat16 hi, int16_t remainder) {
  return FLOAT((uint32_t{hi.bits} << 16) + static_cast<uint32_t>(int32_t{remainder}));
}

INLINE void store_master(float& weight, int16_t&, float master) { weight = canonical(master); }
INLINE void store_master(BFloat16& hi, int16_t& remainder, float master) {
  const uint32_t bits = BITS(canonical(master));
  hi.bits = static_cast<uint16_t>((bits + 0x8000u) >> 16);
  remainder = static_cast<int16_t>(bits & 0xFFFFu);  // bits - (hi << 16): the low half, read as signed
}

constexpr float kLargest = 3.40282346638528859812e+38f;  // finite

struct Segment {           // native.Segment mirrors it
  int64_t start, stop;     // elements of the tile
  float decay;             // 1 - lr * weight_decay
  float gradient_weight;   // 1 - beta1
  float beta2;
  float square_weight;     // 1 - beta2
  float root_correction;   // sqrt(1 - beta2 ** step)
  float inverse, rest;     // 1 / root_correction, rounded, and what the rounding left out, rounded
  float eps;
  float negative_step;     // -lr / (1 - beta1 ** step)
};

// x / s.root_correction, with the bits of a division. Divisions are not pipelined; multiplications and additions are.
// The first quotient is at most a hair more than half a unit off, so that its remainder is exact, and adding the remainder
// over the divisor rounds correctly (Markstein, IBM J. Res. Dev. 34, 1990). x is a square root: nothing here underflows.
INLINE Exact over_root_correction(Exact x, const Segment& s) {
  const Exact near = FMA(x, Exact(s.inverse), x * Exact(s.rest));
  const Exact remainder = FMA(Exact(-s.root_correction), near, x);
  const Exact quotient = FMA(remainder, Exact(s.inverse), near);
  return VALUE(x) <= kLargest ? quotient : x;  // inf and NaN stay
}

// The operations of torch.optim.AdamW on FP32, in its order and with its roundings: torch's lerp and addcmul are fused
// multiply-adds on every processor that has them, so these are too. What a caller does not store, the compiler leaves out.
template <class Weight, class Gradient>
INLINE void update(Weight& weight, int16_t& remainder, Gradient stored, float& first, float& second, float scale,
                   const Segment& s) {
  // torch.lerp starts from its nearer end, so that a weight of 1 gives the gradient exactly.
  const bool from_moment = s.gradient_weight < 0.5f;
  const float lerp_weight = from_moment ? s.gradient_weight : s.gradient_weight - 1.0f;
  const Exact old_first(first), old_second(second);
  const Exact gradient = Exact(load(stored)) * Exact(scale);
  const Exact master = Exact(load_master(weight, remainder)) * Exact(s.decay);
  const Exact m = FMA(Exact(lerp_weight), gradient - old_first, from_moment ? old_first : gradient);
  const Exact v = FMA(Exact(s.square_weight) * gradient, gradient, old_second * Exact(s.beta2));
  const Exact denominator = over_root_correction(SQRT(v), s) + Exact(s.eps);
  first = canonical(VALUE(m));
  second = canonical(VALUE(v));
  store_master(weight, remainder, VALUE(master + (Exact(s.negative_step) * m) / denominator));
}
