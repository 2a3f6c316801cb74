"""Recurrent mixers as two ops of our own, so that a graph holds for any length: linear recurrences with a matrix as state, and
short causal convolutions.

Their `kernel` argument is set by the `recurrence` pass for the target device; "neutral" runs as "reference". The kernels are in
`recurrence_kernels.py`. Which functions of transformers call these ops stands in `tracing/mixers.py`.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacompile.frontend.ops import recurrence_kernels as kernels

_OF_RECURRENCE = "Tensor query, Tensor key, Tensor value, Tensor decay, Tensor? beta"
_OPTIONS = "float scale, str kernel, Tensor? segments=None"


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


def _recurrence_fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return value.new_empty(value.shape)


def _recurrence_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None, scale: float, kernel: str,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value, decay and beta; that of a missing beta is empty."""
    found = kernels.gradients(kernels.RECURRENCE[kernel], grad_out, (query, key, value, decay, beta), scale, segments)
    query, key, value, decay, beta = found
    return query, key, value, decay, beta


def _recurrence_backward_fake(grad_out: Tensor, *given: Any) -> tuple[Tensor, ...]:
    return tuple(grad_out.new_empty(0) if x is None else x.new_empty(x.shape) for x in given[:5])


recurrence = torch.library.custom_op(
    "megacompile::recurrence", _recurrence, mutates_args=(), schema=f"({_OF_RECURRENCE}, {_OPTIONS}) -> Tensor")
recurrence.register_fake(_recurrence_fake)
recurrence_backward = torch.library.custom_op(
    "megacompile::recurrence_backward", _recurrence_backward, mutates_args=(),
    schema=f"(Tensor grad_out, {_OF_RECURRENCE}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
recurrence_backward.register_fake(_recurrence_backward_fake)


def _save_recurrence(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.options = inputs[5:7]
    ctx.save_for_backward(*inputs[:5], *inputs[7:8])


def _differentiate_recurrence(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, segments = ctx.saved_tensors
    found = torch.ops.megacompile.recurrence_backward(grad_out, *tensors, *ctx.options, segments)
    return (*(None if x is None else y for x, y in zip(tensors, found, strict=True)), None, None, None)


recurrence.register_autograd(_differentiate_recurrence, setup_context=_save_recurrence)


# ------------------------------------------------------------------ short convolutions
_OF_CONV = "Tensor x, Tensor weight, Tensor? bias, str activation, str kernel, Tensor? segments=None"


def _conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, kernel: str, segments: Tensor | None = None,
) -> Tensor:
    """A causal convolution of each channel: out_t = sum_i weight[:, -1 - i] * x_(t - i) + bias, then "silu" or "" for none.

    x [B, T, D]; weight [D, taps]; bias [D]. `segments`, int32 [B, T]: tokens before a sequence count as zeros. Returns [B, T,
    D] in the dtype of x."""
    return kernels.CONV[kernel](x, weight, bias, activation, segments)


def _conv_fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _conv_backward(
    grad_out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, kernel: str,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias; that of a missing bias is empty."""
    of_x, of_weight, of_bias = kernels.gradients(kernels.CONV[kernel], grad_out, (x, weight, bias), activation, segments)
    return of_x, of_weight, of_bias


def _conv_backward_fake(grad_out: Tensor, *given: Any) -> tuple[Tensor, ...]:
    return tuple(grad_out.new_empty(0) if x is None else x.new_empty(x.shape) for x in given[:3])


causal_conv = torch.library.custom_op("megacompile::causal_conv", _conv, mutates_args=(), schema=f"({_OF_CONV}) -> Tensor")
causal_conv.register_fake(_conv_fake)
causal_conv_backward = torch.library.custom_op(
    "megacompile::causal_conv_backward", _conv_backward, mutates_args=(),
    schema=f"(Tensor grad_out, {_OF_CONV}) -> (Tensor, Tensor, Tensor)")
causal_conv_backward.register_fake(_conv_backward_fake)


def _save_conv(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.options = inputs[3:5]
    ctx.save_for_backward(*inputs[:3], *inputs[5:6])


def _differentiate_conv(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, segments = ctx.saved_tensors
    of_x, of_weight, of_bias = torch.ops.megacompile.causal_conv_backward(grad_out, x, weight, bias, *ctx.options, segments)
    return of_x, of_weight, None if bias is None else of_bias, None, None, None


causal_conv.register_autograd(_differentiate_conv, setup_context=_save_conv)
