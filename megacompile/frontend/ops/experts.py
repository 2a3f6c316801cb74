"""Experts of a mixture, traced in a form that compiles into few passes over memory.

A pair is a token and one of the experts that it is sent to. transformers sorts the pairs by expert, multiplies them by grouped
products, and sorts them back. Autograd sees two lookups of rows there, and their gradients are sums at computed places: zeros
are written, then every row is read, added and written again. But the pairs are only permuted, so two ops here are each other's
gradient: one gives each pair the row of its token, one adds up the rows of each token's pairs. Both are lookups.

Routing weights multiply the input of the down projection instead of its output, where nothing is added in between. The product
is the same, the rows are narrower, and the output of the projection is not read again in the backward.
"""
from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacompile.compat.core import grouped_mm

#: Ranks are padded by zeros to a multiple of this: grouped products need rows of a multiple of 16 bytes.
_RANK_MULTIPLE = 8


def _spread(rows: Tensor, order: Tensor, inverse: Tensor, chosen: int) -> Tensor:
    return rows[torch.div(order, chosen, rounding_mode="floor")]


def _gathered(pairs: Tensor, order: Tensor, inverse: Tensor, chosen: int) -> Tensor:
    # Sums of lookups instead of a sum over a dimension, whose compiled reduction is several times slower.
    wide = torch.promote_types(pairs.dtype, torch.float32)
    places = inverse.view(-1, chosen).unbind(1)
    return functools.reduce(torch.add, [pairs[place].to(wide) for place in places]).to(pairs.dtype)


def _biases(bias: Tensor, numbers: Tensor, ends: Tensor) -> Tensor:
    return bias[numbers]


def _sums(rows: Tensor, ends: Tensor) -> Tensor:
    # A sum at computed places adds thousands of rows to each expert's, one after another. A product with ones does not.
    ones = torch.ones(rows.shape[0], _RANK_MULTIPLE, dtype=rows.dtype, device=rows.device)
    return grouped_mm(ones.t(), rows, offs=ends)[:, 0]


_SCHEMA = "(Tensor rows, Tensor order, Tensor inverse, int chosen) -> Tensor"
_spread_op = torch.library.custom_op("megacompile::spread_pairs", _spread, mutates_args=(), schema=_SCHEMA)
_spread_op.register_fake(lambda rows, order, inverse, chosen: rows.new_empty(rows.shape[0] * chosen, rows.shape[1]))
_gather_op = torch.library.custom_op("megacompile::gather_pairs", _gathered, mutates_args=(), schema=_SCHEMA)
_gather_op.register_fake(lambda rows, order, inverse, chosen: rows.new_empty(rows.shape[0] // chosen, rows.shape[1]))
_biases_op = torch.library.custom_op("megacompile::biases_of_pairs", _biases, mutates_args=(), schema=(
    "(Tensor bias, Tensor numbers, Tensor ends) -> Tensor"))
_biases_op.register_fake(lambda bias, numbers, ends: bias.new_empty(numbers.shape[0], bias.shape[1]))
_sums_op = torch.library.custom_op("megacompile::sums_of_pairs", _sums, mutates_args=(), schema=(
    "(Tensor rows, Tensor ends) -> Tensor"))
_sums_op.register_fake(lambda rows, ends: rows.new_empty(ends.shape[0], rows.shape[1]))
#: Rows [N, width] -> rows of pairs [N * chosen, width], sorted by `order`; and rows of pairs -> their sums [N, width].
#: `order` and `inverse`: int64 [N * chosen], permutations of pairs that undo each other.
SPREAD, GATHER = torch.ops.megacompile.spread_pairs, torch.ops.megacompile.gather_pairs
#: Experts' biases [E, width] -> those of pairs, for their experts' numbers, int64 [pairs], sorted, and `ends`, int32 [E], where
#: each expert's pairs end; and rows of pairs -> the sums of each expert's [E, width].
BIASES, SUMS = torch.ops.megacompile.biases_of_pairs, torch.ops.megacompile.sums_of_pairs


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:3])
    ctx.chosen = inputs[3]


def _gradient_by(op: Any) -> Callable[..., tuple[Tensor | None, ...]]:
    return lambda ctx, gradient: (op(gradient, *ctx.saved_tensors, ctx.chosen), None, None, None)


_spread_op.register_autograd(_gradient_by(GATHER), setup_context=_setup)
_gather_op.register_autograd(_gradient_by(SPREAD), setup_context=_setup)
_biases_op.register_autograd(lambda ctx, gradient: (SUMS(gradient.contiguous(), *ctx.saved_tensors), None, None),
                             setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[2]))
#: How the ops are written once their gradients are known, so that compilers fuse them.
DECOMPOSITIONS = {SPREAD.default: _spread, GATHER.default: _gathered, BIASES.default: _biases, SUMS.default: _sums}


@dataclass(frozen=True)
class AdaptedWeight:
    """A parameter with adapters. `factors`: for each adapter (left, right, scale); the parameter's value is
    weight + scale * left @ right, where left is [..., rows, rank] and right [..., rank, columns]."""

    weight: Tensor
    factors: tuple[tuple[Tensor, Tensor, float], ...]

    def sum(self) -> Tensor:
        """The parameter's value."""
        value = self.weight
        for left, right, scale in self.factors:
            value = value + left @ right * scale
        return value


def _product(rows: Tensor, weight: Tensor | AdaptedWeight, ends: Tensor, transposed: bool) -> Tensor:
    """transformers' product of rows [pairs, in], sorted by expert, and the experts' weights. With adapters

        x W_e + (x A_e) B_e        in place of        x (W_e + A_e B_e)

    where the products with factors are grouped too: the sum would need the gradient of all experts' weights."""
    from transformers.integrations.moe import _grouped_linear

    if not isinstance(weight, AdaptedWeight):
        product: Tensor = _grouped_linear(rows, weight, ends, is_transposed=transposed)
        return product
    out = _product(rows, weight.weight, ends, transposed)
    for left, right, scale in weight.factors:
        missing = -right.shape[-2] % _RANK_MULTIPLE
        left, right = F.pad(left, (0, missing)).contiguous(), F.pad(right, (0, 0, 0, missing)).contiguous()
        first, second = (left, right) if transposed else (right, left)
        # The narrow rows are scaled: a scaled copy of the wide result, or of its gradient, takes as long as its product.
        out = out + _product(_product(rows, first, ends, transposed) * scale, second, ends, transposed)
    return out


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """In place of transformers' `grouped_mm_experts_forward`, for hidden_states [N, hidden], numbers of experts, int64 [N, k],
    and their weights [N, k]. Returns [N, hidden]. Traced on the CPU, whose `histc` takes floats.

    With expert parallelism, a number past the last expert stands for an expert elsewhere. Such pairs come last, no product
    reads them, and their rows are zeros."""
    chosen = top_k_index.shape[1]
    numbers, order = torch.sort(top_k_index.reshape(-1))
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    # A bin more than experts, for pairs elsewhere: of one bin, histc would take the range from its input.
    counts = torch.histc(numbers.float(), bins=self.num_experts + 1, min=0, max=self.num_experts)
    ends = torch.cumsum(counts[:-1], dim=0, dtype=torch.int32)
    elsewhere = (numbers >= self.num_experts)[:, None] if getattr(self, "_is_expert_parallel", False) else None
    numbers = numbers.clamp(max=self.num_experts - 1)

    def zeroed(rows: Tensor) -> Tensor:
        return rows if elsewhere is None else rows.masked_fill(elsewhere, 0.0)

    def multiplied(rows: Tensor, name: str) -> Tensor:
        out = _product(rows, getattr(self, name), ends, self.is_transposed)
        if self.has_bias:
            bias = getattr(self, f"{name}_bias")
            out = out + (BIASES(bias, numbers, ends) if bias.dtype == torch.bfloat16 else bias[numbers])
        return zeroed(out)

    weights = SPREAD(top_k_weights.reshape(-1, 1), order, inverse, 1)
    rows = zeroed(SPREAD(hidden_states, order, inverse, chosen))
    rows = self._apply_gate(multiplied(rows, "gate_up_proj")) if self.has_gate else self.act_fn(multiplied(rows, "up_proj"))
    normed = getattr(self, "has_post_expert_norm", False)
    linear = not self.has_bias and not normed
    # A product's gradient of rows that it does not read is not written: zeros in its place must not reach the weights.
    rows = multiplied(zeroed(rows * weights) if linear else rows, "down_proj")
    rows = self.post_expert_norm(rows) if normed else rows
    return GATHER(rows if linear else rows * weights, order, inverse, chosen).to(hidden_states.dtype)


@contextlib.contextmanager
def traced_experts() -> Iterator[None]:
    """A context in which transformers' grouped experts are `experts_forward`, unless the user has replaced them."""
    if "transformers" not in sys.modules:
        yield
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

    if ALL_EXPERTS_FUNCTIONS["grouped_mm"] is not grouped_mm_experts_forward:
        yield
        return
    ALL_EXPERTS_FUNCTIONS["grouped_mm"] = experts_forward
    try:
        yield
    finally:
        del ALL_EXPERTS_FUNCTIONS["grouped_mm"]
