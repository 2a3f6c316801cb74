// Prints how many square roots `over_root_correction` rounds otherwise than a division does: all of two binades, and some at
// both ends of what a square root of FP32 can be. Arguments: root_correction, inverse and rest of a segment, of any number.
#include <cstdio>
#include <cstdlib>
#include "execution.h"
#include "values.h"
#include "rule.h"

int main(int count, char** numbers) {
  long wrong = 0;
  for (int index = 1; index + 2 < count; index += 3) {
    Scalars s{};
    s.root_correction = std::strtof(numbers[index], nullptr);
    s.inverse = std::strtof(numbers[index + 1], nullptr);
    s.rest = std::strtof(numbers[index + 2], nullptr);
    const auto check = [&](uint32_t bits) {
      const float x = FLOAT(bits), quotient = over_root_correction(x, s), divided = x / s.root_correction;
      wrong += BITS(quotient) != BITS(divided) && (quotient == quotient || divided == divided);
    };
    for (uint32_t bits = BITS(1.0f); bits < BITS(4.0f); ++bits) check(bits);
    const float lowest = SQRT(FLOAT(1)), highest = SQRT(kLargest);
    for (uint32_t bits = BITS(lowest); bits < BITS(2 * lowest); bits += 7) check(bits);
    for (uint32_t bits = BITS(highest / 2); bits <= BITS(highest); bits += 7) check(bits);
    check(BITS(0.0f)), check(0x7F800000u), check(0x7FC00000u);
  }
  std::printf("%ld\n", wrong);
}
