"""Recurrent mixers as two ops of our own, so that a graph holds for any length: linear recurrences with a matrix as state, and
short causal convolutions.

Their `kernel` argument is set by the `recurrence` pass for the target device; "neutral" runs as "reference". The kernels are in
`recurrence_kernels.py`. Which functions of transformers call these ops stands in `tracing/recurrent_mixers.py`.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megacompile.frontend.ops import recurrence_kernels as kernels


def _recurrence(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None, scale: float, kernel: str,
    segments: Tensor | None = None,
) -> Tensor:
    """A linear recurrence of each row and head, with a state S [K, V] that is zero before a sequence:

        S = exp(decay_t) * S;  u_t = value_t, or with `beta` u_t = beta_t * (value_t - key_t S);  S = S + key_t^T u_t
        out_t = scale * query_t S

    query, key [B, T, H, K]; value [B, T, Hv, V], Hv a multiple of H; decay, the logarithm of a factor of at most 1, float32 [B,
    T, Hv], or [B, T, Hv, K] for each channel; beta [B, T, Hv] makes it a delta rule (arXiv 2412.06464, with decays for channels
    2510.26692; without beta it is the state-space dual of Mamba-2, arXiv 2405.21060). `segments`, int32 [B, T]: the sequence of
    its row that each position belongs to. Returns [B, T, Hv, V] in the dtype of `value`.
    """
    return kernels.RECURRENCE[kernel](query, key, value, decay, beta, scale, segments)


def _conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, kernel: str, segments: Tensor | None = None,
) -> Tensor:
    """A causal convolution of each channel: out_t = sum_i weight[:, -1 - i] * x_(t - i) + bias, then "silu" or "" for none.

    x [B, T, D]; weight [D, taps]; bias [D]. `segments`, int32 [B, T]: tokens before a sequence count as zeros. Returns [B, T,
    D] in the dtype of x."""
    return kernels.CONV[kernel](x, weight, bias, activation, segments)


def _differentiable(
    name: str, forward: Callable[..., Tensor], by_kernel: Mapping[str, Callable[..., Tensor]], tensors: str, option: str,
    like: int,
) -> tuple[Any, Any]:
    """The op `megacompile::name`, and that of its backward, which returns a gradient for each of the `tensors`, empty for one
    that is missing. Their arguments are `tensors`, an `option`, the kernel and segments. `like`: the position of the tensor
    whose shape and dtype the result has."""
    count = tensors.count(",") + 1
    arguments = f"{tensors}, {option}, str kernel, Tensor? segments=None"

    def backward(grad_out: Tensor, *given: Any) -> Any:
        chosen, kernel, *segments = given[count:]
        return tuple(kernels.gradients(by_kernel[kernel], grad_out, given[:count], chosen, *(segments or [None])))

    def backward_fake(grad_out: Tensor, *given: Any) -> Any:
        return tuple(grad_out.new_empty(0) if x is None else x.new_empty(x.shape) for x in given[:count])

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.options = inputs[count:count + 2]
        ctx.save_for_backward(*inputs[:count], inputs[count + 2])

    def differentiate(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        *saved, segments = ctx.saved_tensors
        found = of_backward(grad_out, *saved, *ctx.options, segments)
        return *(None if x is None else gradient for x, gradient in zip(saved, found, strict=True)), None, None, None

    made = torch.library.custom_op(f"megacompile::{name}", forward, mutates_args=(), schema=f"({arguments}) -> Tensor")
    made.register_fake(lambda *given: given[like].new_empty(given[like].shape))
    torch.library.custom_op(
        f"megacompile::{name}_backward", backward, mutates_args=(),
        schema=f"(Tensor grad_out, {arguments}) -> ({', '.join(['Tensor'] * count)})").register_fake(backward_fake)
    of_backward = getattr(torch.ops.megacompile, f"{name}_backward")
    made.register_autograd(differentiate, setup_context=save)
    return made, of_backward


recurrence, recurrence_backward = _differentiable(
    "recurrence", _recurrence, kernels.RECURRENCE, "Tensor query, Tensor key, Tensor value, Tensor decay, Tensor? beta",
    "float scale", like=2)
causal_conv, causal_conv_backward = _differentiable(
    "causal_conv", _conv, kernels.CONV, "Tensor x, Tensor weight, Tensor? bias", "str activation", like=0)
