"""The CPU as a device with memory of its own, where a streamed model's copy takes room, and layers may have to take turns."""
from __future__ import annotations

from typing import Any

import pytest

from megacompile.streaming.device_copy import DeviceCopy
from megacompile.streaming.layer_slots import slot_bytes


def patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on copies take memory, and their tensors are not the tiles' own."""
    monkeypatch.setattr(DeviceCopy, "_takes_memory", True)
    monkeypatch.setattr(DeviceCopy, "_there", lambda self, tensor: tensor.detach().clone())


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
