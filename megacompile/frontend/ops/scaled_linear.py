"""A linear layer whose products are computed in float8. AOT traces through it: casts become ordinary ops, which a compiler
fuses with what makes their operands, and each product becomes `megacompile::scaled_mm`.

With x [T, K], weight [N, K] and the output's gradient g [T, N]:

    output             x @ weight.T    summed over K
    gradient of x      g @ weight      summed over N
    gradient of weight g.T @ x         summed over T

Both operands of a product must have the dimension that is summed over next to each other in memory. With one scale for a
matrix, its values are rounded once, and copied for the second layout. With scales of rows, they are scaled and rounded again
for each product, since a scale must not change along the dimension that is summed over.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacompile.codegen import scaled_products  # noqa: F401  # registers the op
from megacompile.ir.precision import FORMATS, Float8

#: The smallest largest value that is scaled; a matrix of zeros has no scale of its own.
_LEAST = 1e-20


def quantized(x: Tensor, form: str, scaling: str) -> tuple[Tensor, Tensor]:
    """Values rounded to nearest in a float8 format, and their scale: x is about values * scale. x [rows, columns]. `form`:
    "e4m3" or "e5m2". `scaling`: "tensor": the scale is float32 []; "row": float32 [rows, 1]. The largest absolute value becomes
    the format's largest. A value that is not finite makes all values with its scale NaN."""
    dtype = FORMATS[form]
    largest = torch.finfo(dtype).max
    # A maximum of rows first: the same number, and a compiler computes it where it makes the rows.
    maximum = x.abs().amax(-1, keepdim=True).float()
    if scaling == "tensor":
        maximum = maximum.amax()
    maximum = maximum.clamp(min=_LEAST)
    return (x.float() * (largest / maximum)).clamp(-largest, largest).to(dtype), maximum / largest


def _product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], bias: Tensor | None, dtype: torch.dtype,
             kernel: str) -> Tensor:
    """a @ b.T, each given as values [rows, K] and their scales."""
    result: Tensor = torch.ops.megacompile.scaled_mm(
        a[0], b[0].t(), a[1], b[1].t() if b[1].dim() else b[1], bias, dtype, kernel)
    return result


def _transposed(x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The transpose of a matrix with one scale, in memory."""
    return x[0].t().contiguous(), x[1]


class _ScaledLinear(torch.autograd.Function):
    """`scaled_linear` of two-dimensional values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Float8) -> Tensor:  # type: ignore[override]
        rounded, rounded_weight = (quantized(value, "e4m3", recipe.scaling) for value in (x, weight))
        ctx.recipe, ctx.dtypes, ctx.once = recipe, (x.dtype, weight.dtype), recipe.scaling == "tensor"
        # With one scale for a matrix, the backward reads the same rounded values.
        saved = rounded if ctx.once and recipe.weight_gradients == "float8" else (x, None)
        ctx.save_for_backward(*saved, *(rounded_weight if ctx.once else (weight, None)))
        return _product(rounded, rounded_weight, bias, x.dtype, recipe.kernel(True))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        recipe: Float8 = ctx.recipe
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        dtype, weight_dtype = ctx.dtypes
        rounded = quantized(gradient, recipe.gradients, recipe.scaling) if of_x or ctx.once else None
        made: list[Tensor | None] = [None, None, gradient.sum(0) if of_bias else None, None]
        if of_x:
            assert rounded is not None
            other = (_transposed((weight, weight_scale)) if ctx.once else
                     quantized(weight.t().contiguous(), "e4m3", recipe.scaling))
            made[0] = _product(rounded, other, None, dtype, recipe.kernel(False))
        if of_weight and recipe.weight_gradients == "bfloat16":
            made[1] = (gradient.t() @ x).to(weight_dtype)
        elif of_weight:
            if ctx.once:
                assert rounded is not None
                operands = _transposed(rounded), _transposed((x, x_scale))
            else:
                operands = (quantized(gradient.t().contiguous(), recipe.gradients, recipe.scaling),
                            quantized(x.t().contiguous(), "e4m3", recipe.scaling))
            made[1] = _product(*operands, None, torch.float32, recipe.kernel(False)).to(weight_dtype)
        return tuple(made)


def scaled_linear(x: Tensor, weight: Tensor, bias: Tensor | None, scaling: str, gradients: str, weight_gradients: str,
                  fast_accumulation: str, emulated: bool) -> Tensor:
    """x @ weight.T + bias, forward and backward in float8.

    x [..., K], weight [N, K], bias [N] or None, all in bfloat16 or float32. Returns [..., N] in x's dtype. The other arguments
    are fields of a `Float8`."""
    recipe = Float8(scaling, gradients, weight_gradients, fast_accumulation, emulated=emulated)
    flat: Tensor = _ScaledLinear.apply(x.reshape(-1, x.shape[-1]), weight, bias, recipe)
    # As `linear` does it: an output must not be a view of something else.
    result: Tensor = torch.ops.aten._unsafe_view(flat, [*x.shape[:-1], weight.shape[0]])
    return result


_library = torch.library.Library("megacompile", "FRAGMENT")
_library.define("scaled_linear(Tensor x, Tensor weight, Tensor? bias, str scaling, str gradients, str weight_gradients, "
                "str fast_accumulation, bool emulated) -> Tensor")
_library.impl("scaled_linear", scaled_linear, "CompositeImplicitAutograd")
