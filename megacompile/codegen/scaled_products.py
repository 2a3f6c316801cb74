"""Products of float8 matrices with scales: the op `megacompile::scaled_mm`, and its kernels.

    float8        the GPU's, with FP32 sums
    float8_fast   the GPU's, which keeps fewer bits of its sums on Hopper
    emulated      the same product of the same values in FP32, on any device
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megacompile.codegen.cublas_lt import ALIGNMENT, add_product

_GPU_KERNELS = ("float8", "float8_fast")


def scaled_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, dtype: torch.dtype,
                   kernel: str) -> Tensor:
    """(a * scale_a) @ (b * scale_b) + bias, summed in FP32 and rounded once.

    a [M, K] and b [K, N] in float8, with K next to each other in memory in both; scales float32, [] for a whole matrix, or
    [M, 1] and [1, N]; bias [N] or None. Returns [M, N] in `dtype`; with scales of rows it is rounded to bfloat16 first, which
    is all that kernels give. Raises `ValueError` for an unknown kernel."""
    by_rows = scale_a.dim() > 0
    given = torch.bfloat16 if by_rows else dtype
    if kernel == "emulated":
        product = torch.mm(a.float(), b.float()) * (scale_a * scale_b)
        return (product if bias is None else product + bias).to(given).to(dtype)
    if kernel not in _GPU_KERNELS:
        raise ValueError(f"no such kernel: {kernel}")
    first, second = _operands(a, b)
    how = F.ScalingType.RowWise if by_rows else F.ScalingType.TensorWise
    return F.scaled_mm(first, second.t(), scale_a, how, scale_b, how, bias=bias, output_dtype=given,
                       use_fast_accum=kernel == "float8_fast").to(dtype)


def add_scaled_product(into: Tensor, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, kernel: str) -> None:
    """into += scaled_product(a, b, scale_a, scale_b, None, torch.float32, kernel). `into` is float32 [M, N], contiguous."""
    if kernel in _GPU_KERNELS and not scale_a.dim():
        add_product(into, *_operands(a, b), scale_a, scale_b, fast=kernel == "float8_fast")
    else:
        into.add_(scaled_product(a, b, scale_a, scale_b, None, torch.float32, kernel))


def _operands(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a and the transpose of b, row-major and padded with zeros along K: kernels read it in units of `ALIGNMENT`, and weight
    gradients are summed over tokens, of which there may be any number."""
    first, second = a.contiguous(), b.t().contiguous()
    if missing := -a.shape[1] % ALIGNMENT:
        first, second = (F.pad(x.view(torch.uint8), (0, missing)).view(x.dtype) for x in (first, second))
    return first, second


def _scaled_mm_fake(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, dtype: torch.dtype,
                    kernel: str) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)


scaled_mm = torch.library.custom_op("megacompile::scaled_mm", scaled_product, mutates_args=(), schema=(
    "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType dtype, str kernel) -> Tensor"))
scaled_mm.register_fake(_scaled_mm_fake)
