"""Exchanges between ranks that have a sequence together: ops that a layer's graph calls around attention.

    query, key, value  [B, heads, T, D]        of this rank's tokens, all heads
    to_heads           [B, heads / n, n T, D]  of all tokens, this rank's heads: what attention takes and returns
    to_tokens          [B, heads, T, D]        of this rank's tokens again

`n` ranks have T tokens each, one after the other. Each of these ops is the gradient of the other. `all_tokens` gathers a number
of each token, and `own_heads` takes this rank's part of a value of each head.
"""
from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class SequenceExchange(Protocol):
    """The exchanges of the ranks that have a sequence together. `position`: of this rank among them."""

    @property
    def position(self) -> int: ...

    def all_to_all(self, sent: Tensor) -> Tensor:
        """[n, ...] -> [n, ...]: part i of the result is what rank i sent to this one. Runs on the current stream, in the lane
        that calls it, in the same order on all ranks."""


#: The exchange of this process for each number of ranks. A graph names the number alone, so that all ranks have one graph.
_known: dict[int, SequenceExchange] = {}


def connect_sequences(ranks: int, exchange: SequenceExchange) -> None:
    """Makes the ops for this number of ranks use `exchange`."""
    _known[ranks] = exchange


def _of(ranks: int) -> SequenceExchange:
    assert ranks in _known, f"no sequence is divided among {ranks} ranks"
    return _known[ranks]


def heads_of_a_rank(heads: int, ranks: int) -> int:
    """The heads of each rank. Where they do not divide evenly, the last ranks' last heads are zeros."""
    return -(-heads // ranks)


def _to_heads(x: Tensor, ranks: int) -> Tensor:
    """[B, heads, T, D] of this rank's tokens -> [B, heads / n, n T, D] of its heads, in memory [B, n T, heads / n, D]."""
    batch, heads, length, width = x.shape
    own = heads_of_a_rank(heads, ranks)
    sent = x.new_empty(ranks, batch, length, own, width)
    by_head = x.transpose(1, 2)
    for rank, part in enumerate(sent):
        there = by_head[:, :, rank * own:(rank + 1) * own]
        part[:, :, :there.shape[2]] = there
        part[:, :, there.shape[2]:] = 0
    received = _of(ranks).all_to_all(sent)
    return received.transpose(0, 1).reshape(batch, ranks * length, own, width).transpose(1, 2)


def _to_tokens(x: Tensor, ranks: int, heads: int) -> Tensor:
    """[B, heads / n, n T, D] of this rank's heads -> [B, heads, T, D] of its tokens, in memory [B, T, heads, D]."""
    batch, own, length, width = x.shape
    sent = x.transpose(1, 2).reshape(batch, ranks, length // ranks, own, width).transpose(0, 1).contiguous()
    received = _of(ranks).all_to_all(sent)
    joined = received.permute(1, 2, 0, 3, 4).reshape(batch, length // ranks, ranks * own, width)
    return joined[:, :, :heads].contiguous().transpose(1, 2)


def _all_tokens(x: Tensor, ranks: int) -> Tensor:
    """[B, T] of this rank's tokens -> [B, n T] of all of them."""
    received = _of(ranks).all_to_all(x.expand(ranks, *x.shape).contiguous())
    return received.transpose(0, 1).reshape(x.shape[0], ranks * x.shape[1])


def _own_heads(x: Tensor, ranks: int) -> Tensor:
    """[heads] -> [heads / n], those of this rank."""
    own = heads_of_a_rank(len(x), ranks)
    part = x[_of(ranks).position * own:][:own]
    return torch.cat([part, part.new_zeros(own - len(part))])


def _among_all_heads(x: Tensor, ranks: int, heads: int) -> Tensor:
    """[heads / n] of this rank -> [heads], zeros for the heads of other ranks."""
    whole = x.new_zeros(ranks, *x.shape)
    whole[_of(ranks).position] = x
    return whole.flatten()[:heads].clone()


def _heads_fake(x: Tensor, ranks: int) -> Tensor:
    batch, heads, length, width = x.shape
    return x.new_empty(batch, ranks * length, heads_of_a_rank(heads, ranks), width).transpose(1, 2)


def _tokens_fake(x: Tensor, ranks: int, heads: int) -> Tensor:
    batch, _, length, width = x.shape
    return x.new_empty(batch, length // ranks, heads, width).transpose(1, 2)


_GIVEN, _WITH_HEADS = "(Tensor x, int ranks) -> Tensor", "(Tensor x, int ranks, int heads) -> Tensor"
for _name, _schema, _function, _fake in (
    ("to_heads", _GIVEN, _to_heads, _heads_fake),
    ("to_tokens", _WITH_HEADS, _to_tokens, _tokens_fake),
    ("all_tokens", _GIVEN, _all_tokens, lambda x, ranks: x.new_empty(x.shape[0], ranks * x.shape[1])),
    ("own_heads", _GIVEN, _own_heads, lambda x, ranks: x.new_empty(heads_of_a_rank(x.shape[0], ranks))),
    ("among_all_heads", _WITH_HEADS, _among_all_heads, lambda x, ranks, heads: x.new_empty(heads)),
):
    torch.library.custom_op(f"megacompile::{_name}", _function, mutates_args=(), schema=_schema).register_fake(_fake)

ops = torch.ops.megacompile


def _keep_sizes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.ranks, ctx.heads = inputs[1], inputs[0].shape[1 if inputs[0].dim() > 1 else 0]


torch.library.register_autograd("megacompile::to_heads", lambda ctx, gradient: (
    ops.to_tokens(gradient, ctx.ranks, ctx.heads), None), setup_context=_keep_sizes)
torch.library.register_autograd("megacompile::to_tokens", lambda ctx, gradient: (
    ops.to_heads(gradient, ctx.ranks), None, None), setup_context=_keep_sizes)
torch.library.register_autograd("megacompile::own_heads", lambda ctx, gradient: (
    ops.among_all_heads(gradient, ctx.ranks, ctx.heads), None), setup_context=_keep_sizes)
