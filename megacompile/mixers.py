"""Linear recurrences and short convolutions for architectures of your own: they run in any PyTorch model, and a streamed model
captures each as one op, for any length, with the fastest kernel of its device."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megacompile.errors import MegacompileError
from megacompile.frontend.ops import recurrence as _  # noqa: F401 (registers the ops)
from megacompile.frontend.ops.mixer_ops import MIXERS, REGISTERED, Mixer, op_name

__all__ = ["causal_conv", "recurrence", "register_mixer"]


def recurrence(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None = None, scale: float = 1.0,
               segments: Tensor | None = None) -> Tensor:
    """A linear recurrence of each row and head. The state S [K, V] is zero before a sequence; for each token,

        S = exp(decay) * S;  S = S + key^T value, or with `beta` S = S + key^T (beta * (value - key S));  out = scale * query S

    query, key: [B, T, H, K]. value: [B, T, Hv, V], Hv a multiple of H. decay: float32 logarithms, at most 0, [B, T, Hv], or [B,
    T, Hv, K] for each channel. beta: [B, T, Hv]; makes it a delta rule (arXiv 2412.06464; with decays of channels 2510.26692;
    without beta it is the state-space dual of Mamba-2, arXiv 2405.21060). segments: int32 [B, T], the sequence of its row that
    each token belongs to, in packed rows. Returns [B, T, Hv, V] in the dtype of `value`. Computes in float32 at least, or on
    CUDA in bf16 with kernels of flash-linear-attention, if it is installed."""
    return torch.ops.megacompile.recurrence(  # type: ignore[no-any-return]
        query, key, value, decay, beta, float(scale), "neutral", segments)


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None = None, silu: bool = False,
                segments: Tensor | None = None) -> Tensor:
    """A causal convolution of each channel, followed by SiLU if `silu`.

    x: [B, T, D]. weight: [D, taps], the last tap for the token itself. bias: [D]. segments: int32 [B, T], as for `recurrence`.
    Returns [B, T, D] in the dtype of x."""
    return torch.ops.megacompile.causal_conv(  # type: ignore[no-any-return]
        x, weight, bias, "silu" if silu else "", "neutral", segments)


def register_mixer(op: Any, *, segments: str | None = None, flops: Callable[..., Any] | None = None,
                   workspace_bytes: Callable[..., Any] | None = None) -> None:
    """Tells captures about a custom op of yours (made with `torch.library`) that exchanges values between tokens.

    The op is opaque: it needs a fake (`register_fake`) and a backward (`register_autograd`) that is such an op too, and must
    hold for any number of rows and tokens. Register both. op: as in `torch.ops`. segments: the name of its argument that holds
    the sequence of each token, int32 [B, T]; then packed rows hold their sequences apart. Without it they are padded. flops,
    workspace_bytes: functions of the op's arguments, with the shape of each tensor instead of the tensor, for plans; they may
    get symbols. Without `flops`, plans count the bytes that it reads and writes.

    Raises `MegacompileError` if the op has no such argument, or is one of ours."""
    name = op_name(op)
    if name in MIXERS:
        raise MegacompileError(f"{name} is an op of megacompile: register your own")
    names = [each.name for each in getattr(op, "default", op)._schema.arguments]
    if segments is not None and segments not in names:
        raise MegacompileError(f"{name} has no argument {segments}: it has {', '.join(names)}")
    REGISTERED[name] = Mixer(None if segments is None else names.index(segments), flops, workspace_bytes)
