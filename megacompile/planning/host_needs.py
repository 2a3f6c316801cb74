"""Whether training a model fits host memory, from its parameters alone, before anything is traced, loaded or planned."""
from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from megacompile.errors import InsufficientMemoryError
from megacompile.frontend.tracing.layers import LayerStack
from megacompile.planning.config import StreamConfig
from megacompile.sizes import format_bytes
from megacompile.weights.tiling import HOST_MARGIN_BYTES, Tiling

#: Bytes per trained parameter of a bf16 model: weights, gradients, remainder and moments.
TRAINED_BYTES = 14


def check_host_first(model: nn.Module, stack: LayerStack, config: StreamConfig, available: int) -> None:
    """Raises `InsufficientMemoryError`, with what would fit, if the layers alone take more than the host has. All of them are
    read; only a trace can say which other parameters are."""
    if host_bytes(stack.layers, config) + HOST_MARGIN_BYTES > available:
        raise host_too_small(model, stack, config, host_bytes([model], config), available)


def host_bytes(modules: Iterable[nn.Module], config: StreamConfig, trained: bool | None = None) -> int:
    """Bytes of host memory that training takes for these modules' parameters, shared ones counted once. `trained`: count all of
    them as trained, or as frozen; None: each as it is."""
    parameters = {id(p): p for module in modules for p in module.parameters()}.values()
    return sum(p.numel() * _bytes(p, config, p.requires_grad if trained is None else trained) for p in parameters)


def _bytes(parameter: torch.Tensor, config: StreamConfig, trained: bool) -> int:
    dtype = config.dtype or parameter.dtype
    state = 8 + (2 if dtype == torch.bfloat16 else 0)
    return dtype.itemsize * (1 + trained) + state * trained


def host_too_small(model: nn.Module, stack: LayerStack, config: StreamConfig, needed: int,
                   available: int) -> InsufficientMemoryError:
    """The error for a host with too little memory: what is needed, what is available, and what would fit."""
    count = sum(p.numel() for p in model.parameters())
    return InsufficientMemoryError(
        f"training {type(model).__name__} takes {format_bytes(needed + HOST_MARGIN_BYTES)} of host memory ({count / 1e9:.3g} G "
        f"parameters, {needed / count:.3g} bytes each) and {format_bytes(available)} are available: "
        f"{'; '.join(_smaller(model, stack, config, needed, available))}; or plan for a host with more memory (host_memory)")


def _smaller(model: nn.Module, stack: LayerStack, config: StreamConfig, needed: int, available: int) -> list[str]:
    """Smaller choices that fit the host, the least change first."""
    room, found = available - HOST_MARGIN_BYTES, []
    wide = any((config.dtype or p.dtype) == torch.float32 for p in model.parameters())
    narrow = host_bytes([model], StreamConfig(dtype=torch.bfloat16))
    if wide and narrow <= room:
        found.append(f"in bfloat16 it takes {format_bytes(narrow + HOST_MARGIN_BYTES)}")
    frozen = host_bytes([model], config, trained=False)
    if needed > frozen <= room:
        more = [host_bytes(stack.layers[first:], config, trained=True) - host_bytes(stack.layers[first:], config, trained=False)
                for first in range(len(stack.layers))]
        upper = sum(size <= room - frozen for size in more)
        found.append(f"frozen, with adapters that train (LoRA), it takes {format_bytes(frozen + HOST_MARGIN_BYTES)} plus the "
                     "adapters")
        if upper:
            found.append(f"the last {upper} of {len(stack.layers)} layers can train, with all else frozen")
    elif needed > frozen:
        found.append(f"even frozen, with adapters, it takes {format_bytes(frozen + HOST_MARGIN_BYTES)}")
    if room >= TRAINED_BYTES * 10**8:
        found.append(f"a model of up to {room / TRAINED_BYTES / 1e9:.3g} G parameters fits in bfloat16")
    return found or ["use a smaller model"]


def check_state(tiling: Tiling, room: int) -> None:
    """Raises `InsufficientMemoryError` if tiles with their state take more than `room` bytes of host memory."""
    needed = tiling.host_bytes() + tiling.ranks * HOST_MARGIN_BYTES
    if needed > room:
        raise InsufficientMemoryError(
            f"training with this optimizer takes {format_bytes(needed)} of host memory and {format_bytes(room)} are available: "
            "keep smaller state (state_dtype), or use a machine with more memory")
