"""Experts of a mixture, traced in a form that compiles into few passes over memory.

A pair is a token and one of the experts that it is sent to. transformers sorts the pairs by expert, multiplies them by grouped
products, and sorts them back. Autograd sees two lookups of rows there, and their gradients are sums at computed places: zeros
are written, then every row is read, added and written again. But the pairs are only permuted, so each gradient is a lookup by
the inverse permutation, which is an op here. The sums over a token's pairs are then made while rows are read.

Routing weights multiply the input of the down projection instead of its output, where nothing is added in between. The product
is the same, the rows are narrower, and the output of the projection is not read again in the backward.
"""
from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _permuted(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """rows[order]. `order` and `inverse`: int64 [rows], permutations that undo each other."""
    return rows[order]


_op = torch.library.custom_op("megacompile::permuted", _permuted, mutates_args=(),
                              schema="(Tensor rows, Tensor order, Tensor inverse) -> Tensor")
_op.register_fake(lambda rows, order, inverse: torch.empty_like(rows, memory_format=torch.contiguous_format))
PERMUTED = torch.ops.megacompile.permuted


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    order, inverse = ctx.saved_tensors
    return PERMUTED(gradient, inverse, order), None, None


_op.register_autograd(_backward, setup_context=_setup)
#: How the op is written once its gradient is known, so that compilers fuse it.
DECOMPOSITIONS = {PERMUTED.default: _permuted}


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


#: Ranks are padded by zeros to a multiple of this: grouped products need rows of a multiple of 16 bytes.
_RANK_MULTIPLE = 8


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
        out = out + _product(_product(rows, first, ends, transposed), second, ends, transposed) * scale
    return out


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """In place of transformers' `grouped_mm_experts_forward`, for hidden_states [N, hidden], numbers of experts, int64 [N, k],
    and their weights [N, k]. Returns [N, hidden]. With expert parallelism, a number past the last expert stands for an expert
    elsewhere. Such pairs come last, no product reads them, and their rows are zeros."""
    tokens, chosen = top_k_index.shape
    numbers, order = torch.sort(top_k_index.reshape(-1))
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    counted = numbers.int() if numbers.is_cuda else numbers.float()
    counts = torch.histc(counted, bins=self.num_experts, min=0, max=self.num_experts - 1)
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    elsewhere = (numbers >= self.num_experts)[:, None] if getattr(self, "_is_expert_parallel", False) else None
    numbers = numbers.clamp(max=self.num_experts - 1)

    def zeroed(rows: Tensor) -> Tensor:
        return rows if elsewhere is None else rows.masked_fill(elsewhere, 0.0)

    def multiplied(rows: Tensor, name: str) -> Tensor:
        out = zeroed(_product(rows, getattr(self, name), ends, self.is_transposed))
        return out + getattr(self, f"{name}_bias")[numbers] if self.has_bias else out

    pairs = hidden_states[:, None].expand(-1, chosen, -1).reshape(tokens * chosen, -1)
    weights = PERMUTED(top_k_weights.reshape(-1, 1), order, inverse)
    rows = zeroed(PERMUTED(pairs, order, inverse))
    rows = self._apply_gate(multiplied(rows, "gate_up_proj")) if self.has_gate else self.act_fn(multiplied(rows, "up_proj"))
    normed = getattr(self, "has_post_expert_norm", False)
    linear = not self.has_bias and not normed
    rows = multiplied(rows * weights if linear else rows, "down_proj")
    rows = self.post_expert_norm(rows) if normed else rows
    rows = PERMUTED(rows if linear else rows * weights, inverse, order)
    return rows.view(tokens, chosen, -1).sum(dim=1).to(hidden_states.dtype)


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
