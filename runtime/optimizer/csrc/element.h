// How an element's weight and moments are stored, on the host and on the device, by MASTER and MOMENTS of update.cpp. It comes
// after these definitions and values.h.

#if MASTER == 1
using Weight = float;
#else
using Weight = BFloat16;
#endif
#if MOMENTS == 0
using Moment = float;
#elif MOMENTS == 1
using Moment = BFloat16;
#else
using Moment = uint8_t;
#endif

constexpr bool kIsRandom = MOMENTS != 0 || MASTER == 2;

INLINE float load_master(float weight, int16_t) { return weight; }
INLINE float load_master(BFloat16 weight, int16_t remainder) {
  return MASTER == 0 ? join_master(weight, remainder) : load(weight);
}
INLINE void store_master(float& weight, int16_t&, float master, uint32_t) { weight = canonical(master); }
INLINE void store_master(BFloat16& weight, int16_t& remainder, float master, uint32_t random) {
  if (MASTER == 0)
    split_master(weight, remainder, master);
  else
    store_randomly(weight, master, mixed(random) & 0xFFFFu);
}
