"""The values of weights in four bits (`FourBits` in weights/codes.py), as an op: compiled lookups in tables run at a third of
the memory's rate, and a kernel of our own at all of it."""
from __future__ import annotations

import torch
from torch import Tensor

from megacompile.codegen import HAS_TRITON

#: The number of codes of a weight, of codes of a scale, and of scales that share an FP32 scale.
TABLE, MAP, SCALES_IN_GROUP = 16, 256, 256


def _four_bit_values(codes: Tensor, scales: Tensor, block: int, nested: bool, dtype: torch.dtype) -> Tensor:
    if codes.is_cuda and HAS_TRITON:
        from megacompile.codegen import triton_kernels

        return triton_kernels.four_bit_values(codes, scales, block, nested, dtype)
    blocks = 2 * len(codes) // block
    floats, of_scales = (scales[:len(scales) - blocks] if nested else scales).view(torch.float32), scales[len(scales) - blocks:]
    numbers = torch.stack((codes >> 4, codes & 15), dim=-1).view(blocks, block)
    values, largest = floats[:TABLE][numbers.int()], floats[TABLE:]
    if nested:
        of_groups = largest[MAP + 1:, None].expand(-1, SCALES_IN_GROUP).reshape(-1)[:blocks]
        largest = largest[:MAP][of_scales.int()] * of_groups + largest[MAP]
    return (values * largest[:, None]).flatten().to(dtype)


_op = torch.library.custom_op("megacompile::four_bit_values", _four_bit_values, mutates_args=(), schema=(
    "(Tensor codes, Tensor scales, int block, bool nested, ScalarType dtype) -> Tensor"))
_op.register_fake(lambda codes, scales, block, nested, dtype: codes.new_empty(2 * codes.shape[0], dtype=dtype))
#: Codes and scales, uint8, 1-D -> values, 1-D, computed in FP32.
FOUR_BIT_VALUES = torch.ops.megacompile.four_bit_values
