"""Storage of optimizer state: the formats of moments, and the remainder of an FP32 master.

    format      bytes of a moment     rounding
    float32     4                     none
    bfloat16    2                     at random, with the right mean
    8bit        1, and an FP32 scale  at random, in a dynamic map; blocks of 256 elements share a scale
                for each 256

    master      bytes beside the weight
    float32     0 of an FP32 weight, 2 of a bf16 weight: the master is an exact FP32 number
    bfloat16    0: the weight is the master, and is rounded at random

The second moment changes by 0.1% a step, which is less than half of a bf16 step: rounding to the nearest would freeze it. The
random bits are a hash of the parameter, the step and the element's number (`csrc/values.h`), so they are the same for every
plan, on the host and on the device.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

#: Elements that share a scale, and whose random bits have a common key.
BLOCK: Final = 256
_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class StateFormat:
    """A format of moments. `value_bytes`: of an element. `scaled`: each block has an FP32 scale. `number`: in C++."""

    name: str
    number: int
    dtype: torch.dtype
    scaled: bool = False

    @property
    def value_bytes(self) -> int:
        return self.dtype.itemsize

    def scales(self, elements: int) -> int:
        """The number of scales for `elements` elements of a parameter."""
        return -(-elements // BLOCK) if self.scaled else 0

    def bytes(self, elements: int) -> int:
        """Bytes of a moment of `elements` elements of a parameter."""
        return elements * self.value_bytes + 4 * self.scales(elements)


FLOAT32 = StateFormat("float32", 0, torch.float32)
BFLOAT16 = StateFormat("bfloat16", 1, torch.bfloat16)
EIGHT_BITS = StateFormat("8bit", 2, torch.uint8, scaled=True)
FORMATS: Final = {each.name: each for each in (FLOAT32, BFLOAT16, EIGHT_BITS)}


# ---------------------------------------------------------------- random bits, as in csrc/values.h
def mixed(x: Any) -> Any:
    """A 32-bit hash of an int, or of each element of an int64 tensor."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def key_of(seed: int, step: int) -> int:
    """The key of a parameter's random bits in a step."""
    return int(mixed((seed + step * 0x9E3779B9) & _MASK))


def random_bits(key: int, numbers: Tensor) -> Tensor:
    """32 random bits for each element, from its index in its parameter: int64 [n]."""
    blocks: Tensor = mixed((key + numbers // BLOCK) & _MASK)
    found: Tensor = mixed((blocks + (numbers % BLOCK) * 0x9E3779B9) & _MASK)
    return found


# ---------------------------------------------------------------- the formats in PyTorch, to check and replace the kernels
def rounded_randomly(values: Tensor, random: Tensor) -> Tensor:
    """fp32 [n] -> bf16 [n], one of the two nearest. `random`: 16 bits, int64 [n]."""
    bits = torch.where(values.isnan(), 0x7FC00000, values.view(torch.int32).long() & _MASK)
    special = (bits & 0x7F800000) == 0x7F800000
    high = torch.where(special, bits, bits + random) >> 16
    return torch.where(high >= 1 << 15, high - (1 << 16), high).to(torch.int16).view(torch.bfloat16)


def decoded(codes: Tensor, levels: int) -> Tensor:
    """Codes of the dynamic map, integers [n] -> their values from 0 to 1, fp32 [n]."""
    codes = codes.long()
    level = torch.log2(codes.clamp_min(1).double()).floor()
    products = ((codes + 1).double() * torch.exp2(2 * level - 3 * levels)).float()
    number = products.double() * 0.875 - 0.75 * torch.exp2(3 * (level - levels))  # rounded once, as a fused multiply-add
    return torch.where(codes == 0, 0.0, number.float())


def encoded(numbers: Tensor, random: Tensor, levels: int, signed: bool) -> Tensor:
    """Numbers in [0, 1), fp32 [n] -> codes, int64 [n]. `random`: 16 bits, int64 [n]."""
    exponents = 125 - (numbers.view(torch.int32).long() >> 23)
    down = (exponents.clamp_max(3 * levels - 1) + 1) // 3
    place = numbers * torch.exp2((levels + 2 * down).float())
    chance = random.double() * (4095 / 4096 / 65536) + 1 / 8192
    start = (torch.exp2((levels - down).double()) * _single(6 / 7) + (chance - 1).float().double()).float()
    codes = (place.double() * _single(8 / 7) + start.double()).float()
    if signed:  # below the lowest level: 0 or code 1
        codes = torch.where(exponents < 3 * levels - 1, codes, place + chance.float())
    return codes.long()


def _single(number: float) -> float:
    """The nearest FP32 number."""
    return torch.tensor(number, dtype=torch.float32).item()


def load_codes(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """uint8 [n] and the scales of its blocks, fp32 [blocks] -> fp32 [n]."""
    each = scales.repeat_interleave(BLOCK)[:codes.numel()]
    if not signed:
        return decoded(codes, 7) * each
    values = decoded(codes & 127, 6) * each
    return torch.where(codes >= 128, -values, values)


def store_codes(values: Tensor, random: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """fp32 [n] -> codes, uint8 [n], and the scales of its blocks, fp32 [blocks]. `random`: 16 bits, int64 [n]."""
    padded = torch.nn.functional.pad(values.abs(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scales = padded.amax(dim=1)  # NaN if there is one
    inverse = torch.where(scales.isfinite() & (scales > 0), 1 / scales, 0.0)
    numbers = values.abs() * inverse.repeat_interleave(BLOCK)[:values.numel()]
    most = 1 - 2**-24
    numbers = torch.where(numbers < most, numbers, most)
    if not signed:
        codes = torch.where(numbers != 0, encoded(numbers, random, 7, signed).clamp_min(1), 0)
    else:
        codes = encoded(numbers, random, 6, signed) | (values.signbit().long() << 7)
    return codes.to(torch.uint8), scales
