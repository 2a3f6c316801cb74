"""Triton kernels of our own, for CUDA: what compiled graphs and PyTorch's kernels do at a fraction of the memory's rate.

Import this module only where tensors are on a CUDA device: elsewhere Triton may be missing.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add(into, values, count, size: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    inside = at < count
    tl.store(into + at, tl.load(into + at, mask=inside) + tl.load(values + at, mask=inside).to(tl.float32), mask=inside)


def add(into: Tensor, values: Tensor, size: int = 4096) -> None:
    """into += values, for contiguous tensors of one shape: FP32, and any floating dtype."""
    _add[(triton.cdiv(into.numel(), size),)](into, values, into.numel(), size, num_warps=8)


@triton.jit
def _four_bit_values(codes, floats, of_scales, out, blocks, nested: tl.constexpr, half: tl.constexpr,  # type: ignore
                     many: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * many + tl.arange(0, many)
    inside = block < blocks
    if nested:  # 16 values, 256 values of scales, their mean, a scale for each 256 scales
        code = tl.load(of_scales + block, mask=inside, other=0).to(tl.int32)
        group = tl.load(floats + 273 + block // 256, mask=inside, other=0.0)
        largest = tl.load(floats + 16 + code) * group + tl.load(floats + 272)
    else:
        largest = tl.load(floats + 16 + block, mask=inside, other=0.0)
    pairs = tl.load(codes + block[:, None] * half + tl.arange(0, half)[None, :], mask=inside[:, None], other=0).to(tl.int32)
    high = tl.load(floats + (pairs >> 4)) * largest[:, None]
    low = tl.load(floats + (pairs & 15)) * largest[:, None]
    place = block[:, None] * (2 * half) + tl.arange(0, 2 * half)[None, :]
    tl.store(out + place, tl.interleave(high, low).to(out.dtype.element_ty), mask=inside[:, None])


def four_bit_values(codes: Tensor, scales: Tensor, block: int, nested: bool, dtype: torch.dtype, many: int = 64) -> Tensor:
    """The values of codes in `FourBits` (see there), 1-D, with the bits that the CPU computes."""
    blocks = 2 * codes.numel() // block
    floats = (scales[:scales.numel() - blocks] if nested else scales).view(torch.float32)
    out = codes.new_empty(2 * codes.numel(), dtype=dtype)
    _four_bit_values[(triton.cdiv(blocks, many),)](
        codes, floats, scales[scales.numel() - blocks:], out, blocks, nested, block // 2, many, num_warps=4,
        enable_fp_fusion=False)  # a fused product and sum would round once less
    return out


@triton.jit
def _copy(source, target, count, size: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


def on_host(values: Tensor, size: int = 1024) -> Tensor:
    """A contiguous tensor of a few kilobytes, copied to the host by a kernel, for which the host waits. A copy would wait for
    those of weights and gradients that are queued, often a whole model's."""
    found = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    _copy[(triton.cdiv(values.numel(), size),)](values, found, values.numel(), size)
    known = torch.cuda.Event()
    known.record()
    known.synchronize()
    return found
