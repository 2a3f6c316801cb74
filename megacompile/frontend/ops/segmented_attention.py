"""The kernels that `megacompile::attention` runs if rows hold padding or several sequences (its `segments`).

Their results have the layout of those of `attention_kernels`. On CUDA no kernel holds scores: packed rows run as the sequences
that they consist of, and padding is a mask that exists for one layer at a time.
"""
from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from megacompile.codegen import HAS_TRITON
from megacompile.frontend.ops import attention_kernels as whole
from megacompile.frontend.ops.attention_kernels import (
    empty_heads_inside,
    expand_groups,
    heads_inside,
    math_backward,
    scores_of,
    sum_groups,
    visible,
    window_of,
)

aten = torch.ops.aten


# ------------------------------------------------------------------ any device, windows and capped scores
def math_forward(
    query: Tensor, key: Tensor, value: Tensor, segments: Tensor, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    heads = query.shape[1]
    masked, _ = scores_of(query, expand_groups(key, heads), scale, window, softcap, segments)
    logsumexp = masked.logsumexp(-1)
    # A query that sees nothing has weights exp(-inf - 0) = 0, here and in the backward.
    logsumexp = logsumexp.masked_fill(torch.isneginf(logsumexp), 0.0)
    weights = torch.exp(masked - logsumexp[..., None]).to(query.dtype)
    return heads_inside(weights @ expand_groups(value, heads)), logsumexp


def math_segments_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, segments: Tensor,
    scale: float, window: int, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return math_backward(grad_out, query, key, value, out, logsumexp, scale, window, softcap, segments)


# ------------------------------------------------------------------ any kernel on the CPU, sequence by sequence
def _sequences(segments: Tensor, batch: int) -> list[tuple[int, slice]]:
    """The row and the positions of each sequence."""
    length = segments.shape[1]
    assert len(segments) == batch, f"segments of {len(segments)} rows, and {batch} rows of tokens"
    bounds = Bounds.of(segments).on_host.tolist()
    return [(start // length, slice(start % length, (stop - 1) % length + 1)) for start, stop in itertools.pairwise(bounds)]


def _each_forward(
    query: Tensor, key: Tensor, value: Tensor, segments: Tensor, scale: float, window: int, softcap: float, *, kernel: str
) -> tuple[Tensor, Tensor]:
    """Runs each sequence separately: no scores between two sequences are computed."""
    batch, heads, length, width = query.shape
    out = query.new_empty(batch, length, heads, width).transpose(1, 2)
    logsumexp = query.new_empty((batch, heads, length), dtype=torch.float32)
    for row, where in _sequences(segments, len(query)):
        part = (slice(row, row + 1), slice(None), where)
        out[part], logsumexp[part] = whole.FORWARD[kernel](query[part], key[part], value[part], scale, window, softcap)
    return out, logsumexp


def _each_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, segments: Tensor,
    scale: float, window: int, softcap: float, *, kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = empty_heads_inside(query), empty_heads_inside(key), empty_heads_inside(value)
    for row, where in _sequences(segments, len(query)):
        part = (slice(row, row + 1), slice(None), where)
        found = whole.BACKWARD[kernel](grad_out[part], query[part], key[part], value[part], out[part], logsumexp[part],
                                       scale, window, softcap)
        for gradient, of_sequence in zip(gradients, found, strict=True):
            gradient[part] = of_sequence
    return gradients


# ------------------------------------------------------------------ flash attention on CUDA, sequence by sequence
#: By the segments of a batch. Every layer reads the same tensor, so this is found once a micro-batch.
_bounds: Any = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class Bounds:
    """Where the sequences of rows begin. `starts`: the first position of each sequence among all B x T positions, with B x T at
    the end, int32 [sequences + 1], on the device of the rows. `on_host`: the same numbers on the CPU. `longest`: the length of
    the longest sequence. Rows follow each other; segments of different rows are different sequences."""

    starts: Tensor
    on_host: Tensor
    longest: int

    @classmethod
    def of(cls, segments: Tensor) -> Bounds:
        """For segments [B, T]. The host waits for the device the first time."""
        if segments not in _bounds:
            begins, count = torch.ones_like(segments, dtype=torch.bool), segments.numel()
            begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
            # As many numbers as there could be: only the host will know how many there are.
            starts = torch.nonzero_static(begins.flatten(), size=count + 1, fill_value=count).squeeze(1).to(torch.int32)
            read = _on_host(starts)
            sequences = int((read < count).sum())
            read = read[:sequences + 1].clone()
            _bounds[segments] = cls(starts[:sequences + 1], read, int(read.diff().max()))
        found: Bounds = _bounds[segments]
        return found


def _on_host(starts: Tensor) -> Tensor:
    if not (starts.is_cuda and HAS_TRITON):
        return starts.cpu()
    from megacompile.codegen import triton_kernels

    return triton_kernels.on_host(starts)


def _rows(x: Tensor) -> Tensor:
    """[B, heads, T, D] as [B x T, heads, D]."""
    return x.transpose(1, 2).flatten(0, 1)


def flash_packed_forward(
    query: Tensor, key: Tensor, value: Tensor, segments: Tensor, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    assert not softcap, "flash attention does not cap scores"
    batch, heads, length, _ = query.shape
    assert len(segments) == batch, f"segments of {len(segments)} rows, and {batch} rows of tokens"
    bounds = Bounds.of(segments)
    out, logsumexp, *_ = aten._flash_attention_forward(
        _rows(query), _rows(key), _rows(value), bounds.starts, bounds.starts, bounds.longest, bounds.longest, 0.0, True, False,
        scale=scale, **window_of(window))
    out = out.unflatten(0, (batch, length)).transpose(1, 2)
    return heads_inside(out), logsumexp.view(heads, batch, length).transpose(0, 1).contiguous()


def flash_packed_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, segments: Tensor,
    scale: float, window: int, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, length, _ = query.shape
    bounds = Bounds.of(segments)
    no_dropout_state = torch.empty(2, dtype=torch.uint64, device=query.device)  # read only where dropout > 0
    gradients = aten._flash_attention_backward(
        _rows(grad_out), _rows(query), _rows(key), _rows(value), _rows(out),
        logsumexp.transpose(0, 1).reshape(heads, batch * length), bounds.starts, bounds.starts,
        bounds.longest, bounds.longest, 0.0, True, no_dropout_state,
        torch.empty(0, dtype=torch.uint64, device=query.device), scale=scale, **window_of(window))
    grad_query, grad_key, grad_value = (
        heads_inside(g.unflatten(0, (batch, length)).transpose(1, 2)) for g in gradients)
    return grad_query, grad_key, grad_value


# ------------------------------------------------------------------ memory-efficient attention on CUDA, with a mask
def _bias(query: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
    """0 for visible keys and -inf for others, [B, H, T, T] expanded from [B, 1, T, T], and the queries that see nothing, bool
    [B, 1 or H, T, 1]. Such queries see all keys here, since the kernel would otherwise return no number. Their output is not
    used."""
    batch, heads, length, _ = query.shape
    seen = visible(length, query.device, 0, segments)
    blind = ~seen.any(-1, keepdim=True)
    # The kernel wants rows that begin at 16 bytes.
    aligned = query.new_zeros(batch, seen.shape[1], length, -(-length // 16) * 16)
    bias = aligned[..., :length].masked_fill_(~(seen | blind), float("-inf"))
    return bias.expand(batch, heads, length, length), blind


def efficient_forward(
    query: Tensor, key: Tensor, value: Tensor, segments: Tensor, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    assert not window and not softcap, "the memory-efficient kernel is asked for neither windows nor capped scores"
    heads = query.shape[1]
    bias, blind = _bias(query, segments)
    out, logsumexp, *_ = aten._scaled_dot_product_efficient_attention(
        query, expand_groups(key, heads), expand_groups(value, heads), bias, True, 0.0, False, scale=scale)
    return heads_inside(out.masked_fill(blind, 0.0)), logsumexp[..., :query.shape[2]].contiguous()


def efficient_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, segments: Tensor,
    scale: float, window: int, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    heads, groups, length = query.shape[1], key.shape[1], query.shape[2]
    bias, blind = _bias(query, segments)
    # The kernel's logsumexp has rows padded to a multiple of 32 with inf, so that queries that do not exist get weights of 0.
    logsumexp = torch.nn.functional.pad(logsumexp, (0, -length % 32), value=float("inf"))
    no_dropout_state = torch.empty((), dtype=torch.int64, device=query.device)  # read only where dropout > 0
    grad_query, grad_key, grad_value, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad_out.masked_fill(blind, 0.0), query, expand_groups(key, heads), expand_groups(value, heads), bias, out, logsumexp,
        no_dropout_state, no_dropout_state, 0.0, (True, True, True, False), False, scale=scale)
    return (heads_inside(grad_query), heads_inside(sum_groups(grad_key.contiguous(), groups)),
            heads_inside(sum_groups(grad_value.contiguous(), groups)))


FORWARD: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "neutral": math_forward, "packed": math_forward, "math": math_forward, "flash_packed": flash_packed_forward,
    "efficient": efficient_forward, "math_packed": functools.partial(_each_forward, kernel="math"),
    "flash_cpu_packed": functools.partial(_each_forward, kernel="flash_cpu")}
BACKWARD: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
    "neutral": math_segments_backward, "packed": math_segments_backward, "math": math_segments_backward,
    "flash_packed": flash_packed_backward, "efficient": efficient_backward,
    "math_packed": functools.partial(_each_backward, kernel="math"),
    "flash_cpu_packed": functools.partial(_each_backward, kernel="flash_cpu")}
