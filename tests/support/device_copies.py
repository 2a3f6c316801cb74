"""How much room a streamed model's copy takes on its device, and which of its layers take turns there."""
from __future__ import annotations

from typing import Any

from megacompile.streaming.layer_slots import slot_bytes


def bytes_beside(model: Any, staying: int) -> int:
    """How much a use of a streamed model must take beside the weights, so that only so many layers stay on the device."""
    streamed = model.megacompile.streamed
    layers = streamed.device_copy._layers()
    weights = streamed.device_copy._beside(layers) + slot_bytes(layers) + staying * max(layer.bytes for layer in layers)
    return int(streamed.planner.device_bytes - streamed.planner.margin_bytes - weights)


def turning(model: Any) -> int:
    """How many layers of a streamed model's copy take turns."""
    slots = model.megacompile.streamed.device_copy.slots
    return 0 if slots is None else len(slots.layers)
