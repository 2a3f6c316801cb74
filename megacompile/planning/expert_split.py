"""Into how many pieces the experts of a layer are divided: as few as leave half of the device free for everything else."""
from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megacompile.errors import UnsupportedError
from megacompile.frontend.graph.pieces import counts_of, experts_in
from megacompile.frontend.tracing.layers import LayerStack
from megacompile.planning.config import StreamConfig

#: Share of device memory for experts in transit. Activations, boundary tiles and checkpoints need the rest.
SHARE = 0.5


def expert_pieces(model: nn.Module, stack: LayerStack, config: StreamConfig, device_bytes: int | None) -> int:
    """The number of pieces: the user's, or the fewest whose slots and sums fit `SHARE` of `device_bytes`, or one for each
    expert. Decided once, since tiles, templates and calls depend on it. Raises `UnsupportedError` for a given number if the
    model has no experts to divide."""
    found = dict(experts_in(stack))
    if config.expert_pieces is not None:
        if config.expert_pieces > 1 and not found:
            raise UnsupportedError(
                f"expert_pieces={config.expert_pieces} divides experts, and {type(model).__name__} has none that can be "
                "divided (parameters [experts, ...] of a transformers module, without adapters on them): leave it out")
        return config.expert_pieces
    return max((_pieces(experts, config, device_bytes) for experts in found.values()), default=1) if device_bytes else 1


def _pieces(experts: Any, config: StreamConfig, device_bytes: int) -> int:
    number = int(experts.num_experts)
    slots = config.weight_slots or 2
    each = sum(_bytes_on_device(p, config, slots) for p in experts.parameters()) / number
    fitting = (n for n in range(1, number + 1) if max(counts_of(number, n)) * each <= SHARE * device_bytes)
    return next(fitting, number)


def _bytes_on_device(parameter: torch.Tensor, config: StreamConfig, slots: int) -> int:
    """Device bytes of one parameter: all slots of its weights and gradients, and the FP32 sum of its gradient."""
    size = (config.dtype or parameter.dtype).itemsize
    return parameter.numel() * (slots * size + ((config.gradient_slots or 2) * size + 4) * parameter.requires_grad)
