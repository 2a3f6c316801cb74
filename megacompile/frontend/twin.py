"""The fake twin: the model with the same code and structure, on the CPU, whose weights have no data.

Capturing a twin costs no memory (a 72B model is traced in under 1 GB) and leaves the user's model alone. Its fakes live
on the CPU: fakes on "cuda" need a GPU, and a plan for a GPU must be possible without one.
"""
from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megacompile.errors import CaptureError
from megacompile.frontend.adapters import forward_signature
from megacompile.frontend.attention import ATTENTION_NAME, register_with_transformers

CAPTURE_SHAPE = (3, 17)  # batch, length. 0 and 1 would be specialised, and equal sizes could share one symbol.


def is_transformers_model(model: nn.Module) -> bool:
    """Whether `model` follows transformers' conventions (`config`, `set_attn_implementation`)."""
    return hasattr(model, "set_attn_implementation") and hasattr(model, "config")


def fake_twin(model: nn.Module, fakes: FakeTensorMode, own_attention: bool, training: bool = True) -> nn.Module:
    """A copy of `model` in training mode (or not) with fake parameters and buffers of the same shapes, strides and dtypes.

    With `own_attention` a transformers model is switched to our attention function. Ties between parameters survive.
    """
    memo: dict[int, object] = {}
    with fakes:
        for parameter in model.parameters():
            memo[id(parameter)] = nn.Parameter(_fake_like(parameter), requires_grad=parameter.requires_grad)
        for buffer in model.buffers():
            memo[id(buffer)] = _fake_like(buffer)
    try:
        twin: nn.Module = copy.deepcopy(model, memo)
    except (RuntimeError, TypeError) as reason:
        raise CaptureError(
            f"{type(model).__name__} cannot be copied ({str(reason).splitlines()[0]}): keep tensors as parameters or "
            "buffers, and nothing in the model that copy.deepcopy refuses"
        ) from reason
    twin.train(training)
    module: Any
    if is_transformers_model(twin):
        twin.config.use_cache = False  # type: ignore[union-attr]
        for module in twin.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.gradient_checkpointing = False  # recomputation is the plan's choice
        if own_attention:
            register_with_transformers()
            twin.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
    return twin


def _fake_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="cpu")


def fake_batch(
    model: nn.Module, example: dict[str, torch.Tensor] | None, fakes: FakeTensorMode,
    size: tuple[int, int] = CAPTURE_SHAPE,
) -> dict[str, torch.Tensor]:
    """Fake batch inputs of [batch, length] `size`, in the positional order of the model's `forward`.

    `example` gives their names and dtypes; without it, int64 `input_ids` and `labels`.
    Raises `CaptureError` if the model's forward does not take them, needs more, or an input is no [batch, length, ...]
    integer tensor of the same shape as the first.
    """
    parameters = forward_signature(model).parameters
    name = type(model).__name__
    if example is None:
        if not {"input_ids", "labels"} <= parameters.keys():
            raise CaptureError(
                f"{name}.forward has no parameters input_ids and labels: give the batch it is trained on with "
                "example={name: integer tensor of [batch, length], ...}, labels included"
            )
        example = {key: torch.empty(CAPTURE_SHAPE, dtype=torch.long, device="meta") for key in ("input_ids", "labels")}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key in example:
        if key not in parameters and not takes_any:
            raise CaptureError(f"{name}.forward has no parameter {key}: example= must name parameters of forward")
    for key, parameter in parameters.items():
        required = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY, parameter.POSITIONAL_ONLY)
        if required and key not in example:
            raise CaptureError(f"{name}.forward needs {key}: give it a default, or a tensor in example=")
    shape = next(iter(example.values())).shape
    for key, tensor in example.items():
        if tensor.dim() < 2 or tensor.shape != shape or tensor.is_floating_point() or tensor.is_complex():
            raise CaptureError(
                f"batch input {key} is {tensor.dtype} of shape {list(tensor.shape)}: batch inputs must be integer "
                f"tensors [batch, length, ...] of one shape; compute everything else in the model"
            )
    order = [key for key in parameters if key in example] + [key for key in example if key not in parameters]
    with fakes:
        return {key: torch.zeros((*size, *shape[2:]), dtype=example[key].dtype) for key in order}
