"""The kernels of `megacompile::recurrence` and `megacompile::causal_conv`: a reference in PyTorch that runs on any device, and
those of flash-linear-attention on CUDA.

The reference computes a row in chunks. Within a chunk, the states between tokens are never made: a triangular system and
products of pairs of tokens give the same results.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacompile.compat import fla
from megacompile.compat.core import differentiating
from megacompile.frontend.ops.segmented_attention import Bounds

#: Tokens of a chunk of the reference. Decays of channels take chunk x chunk x channels values, so their chunks are small.
CHUNK, CHUNK_OF_CHANNELS = 64, 16


# ------------------------------------------------------------------ any device
def reference_recurrence(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None, scale: float, segments: Tensor | None,
) -> Tensor:
    """See `recurrence`. Computes in float32, or in float64 if the arguments are."""
    batch, length, heads, width = value.shape
    exact = torch.promote_types(value.dtype, torch.float32)
    channels = decay.dim() == 4
    size = CHUNK_OF_CHANNELS if channels else CHUNK
    more = -length % size

    def chunks(x: Tensor) -> Tensor:
        """[B, T, n, ...] as [chunks, B, heads, size, ...]."""
        x = x.to(exact).repeat_interleave(heads // x.shape[2], 2).transpose(1, 2)
        x = F.pad(x, (0, 0) * (x.dim() - 3) + (0, more))
        return x.unflatten(2, (-1, size)).movedim(2, 0)

    queries, keys, values = chunks(query) * scale, chunks(key), chunks(value)
    decays = chunks(decay) if channels else chunks(decay)[..., None]
    betas = None if beta is None else chunks(beta)[..., None]
    alike, follows, stays = (None, None, None) if segments is None else _of_sequences(segments, size, more)
    state = values.new_zeros(batch, heads, key.shape[3], width)
    lower = torch.ones(size, size, dtype=torch.bool, device=value.device).tril()
    made = []
    for at in range(len(values)):
        q, k, v = queries[at], keys[at], values[at]
        total = decays[at].cumsum(2, dtype=torch.float64)  # its differences are the decays between tokens
        seen = lower if alike is None else lower & alike[at][:, None]
        between = total[..., :, None, :] - total[..., None, :, :]
        between = between.to(exact).masked_fill(~seen[..., None], float("-inf")).exp()
        if channels:
            read, known = (torch.einsum("...ik,...jk,...ijk->...ij", x, k, between) for x in (q, k))
        else:
            read, known = (x @ k.transpose(-1, -2) * between[..., 0] for x in (q, k))
        reach, rest = total.to(exact).exp(), (total[..., -1:, :] - total).to(exact).exp()
        left = reach[..., -1:, :]
        if follows is not None and stays is not None:
            reach, rest = reach * follows[at], rest * stays[at]
            left = reach[..., -1:, :]
        if betas is not None:
            system = (betas[at] * known).tril(-1)
            wanted = betas[at] * (v - (k * reach) @ state)
            v = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        made.append((q * reach) @ state + read @ v)
        state = state * left.transpose(-1, -2) + (k * rest).transpose(-1, -2) @ v
    return torch.stack(made, 2).flatten(2, 3)[:, :, :length].transpose(1, 2).to(value.dtype).contiguous()


def _of_sequences(segments: Tensor, size: int, more: int) -> tuple[Tensor, Tensor, Tensor]:
    """What chunks know of the sequences in rows: whether two tokens of a chunk are of one sequence, bool [chunks, B, size,
    size]; and as 1 or 0, [chunks, B, 1, size, 1], whether a token is of the sequence that the chunk before ends with, and of
    the one that its own chunk ends with."""
    at = torch.cat([segments, segments[:, -1:].expand(-1, more)], 1).unflatten(1, (-1, size)).transpose(0, 1)
    ends = at[..., -1:]
    before = torch.cat([ends[:1], ends[:-1]])  # nothing comes before the first chunk: its state is zero
    return at[..., :, None] == at[..., None, :], *((at == end).float()[:, :, None, :, None] for end in (before, ends))


def reference_conv(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, segments: Tensor | None) -> Tensor:
    """See `causal_conv`."""
    exact = torch.promote_types(x.dtype, torch.float32)
    taps, values = weight.to(exact), x.to(exact)
    made = values * taps[:, -1]
    for back in range(1, taps.shape[1]):
        earlier = F.pad(values, (0, 0, back, 0))[:, :x.shape[1]]
        if segments is not None:
            alike = F.pad(segments, (back, 0), value=_NOWHERE)[:, :x.shape[1]] == segments
            earlier = earlier * alike[..., None]
        made = made + earlier * taps[:, -1 - back]
    if bias is not None:
        made = made + bias.to(exact)
    return (F.silu(made) if activation else made).to(x.dtype)


#: A segment that no token is of.
_NOWHERE = -2


# ------------------------------------------------------------------ flash-linear-attention on CUDA
def _as_one_row(tensors: Sequence[Tensor | None], segments: Tensor | None) -> tuple[list[Any], dict[str, Tensor]]:
    """The tensors [B, T, ...] as [1, B x T, ...], and the bounds of their sequences, if rows hold several."""
    if segments is None:
        return list(tensors), {}
    bounds = Bounds.of(segments)
    # With the host's copy, fla does not wait for the device to count chunks.
    return ([x if x is None else x.flatten(0, 1)[None] for x in tensors],
            {"cu_seqlens": bounds.starts, "cu_seqlens_cpu": bounds.on_host})


def fla_recurrence(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None, scale: float, segments: Tensor | None,
) -> Tensor:
    """See `recurrence`. In bf16 or fp16; at most 256 query channels; decays of channels only with `beta`."""
    heads = value.shape[2]
    if beta is None and query.shape[2] < heads:
        query, key = (x.repeat_interleave(heads // x.shape[2], 2) for x in (query, key))
    (*given, beta), bounds = _as_one_row((query, key, value, decay, beta), segments)
    kind = "recurrence" if beta is None else "delta_rule_of_channels" if decay.dim() == 4 else "delta_rule"
    with fla.running():
        out, _ = fla.functions()[kind](*given, *(() if beta is None else (beta,)), scale=scale, **bounds)
    return out.view(value.shape)  # type: ignore[no-any-return]


def fla_conv(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, segments: Tensor | None) -> Tensor:
    """See `causal_conv`."""
    (row,), bounds = _as_one_row((x,), segments)
    with fla.running():
        out, _ = fla.functions()["conv"](row, weight, bias, activation=activation or None, **bounds)
    return out.view(x.shape)  # type: ignore[no-any-return]


RECURRENCE: dict[str, Callable[..., Tensor]] = {"neutral": reference_recurrence, "reference": reference_recurrence,
                                                "fla": fla_recurrence}
CONV: dict[str, Callable[..., Tensor]] = {"neutral": reference_conv, "reference": reference_conv, "fla": fla_conv}


def gradients(kernel: Callable[..., Tensor], grad_out: Tensor, tensors: Sequence[Tensor | None], *rest: Any) -> list[Tensor]:
    """The gradients of the `tensors` that `kernel(*tensors, *rest)` reads, empty for None. The kernel runs again, and PyTorch
    differentiates it."""
    with differentiating(), fla.running() if kernel in (fla_recurrence, fla_conv) else contextlib.nullcontext():
        leaves = [None if x is None else x.detach().requires_grad_() for x in tensors]
        found = iter(torch.autograd.grad(kernel(*leaves, *rest), [x for x in leaves if x is not None], grad_out))
    return [grad_out.new_empty(0) if x is None else next(found).contiguous() for x in leaves]
