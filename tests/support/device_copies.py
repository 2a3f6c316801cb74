"""How much room a streamed model's copy takes on its device, and which of its layers take turns there."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import engine
import pytest
import tiny_models

import megacompile
from megacompile.streaming.generation.turns import TurningLayer, copied_bytes, slot_bytes, turns_program


def streamed_in_module(layers: int) -> Any:
    """A fixture: the streamed model, in evaluation mode, that the tests of one module share."""
    @pytest.fixture(scope="module")
    def streamed() -> Iterator[Any]:
        model = megacompile.stream(tiny_models.build(num_hidden_layers=layers).eval(), device="cpu")
        yield model
        model.megacompile.close()

    return streamed


def bytes_beside(model: Any, staying: int) -> int:
    """How much a use of a streamed model must take beside the weights, so that only so many layers stay on the device."""
    planner = engine.planner(model)
    return int(planner.device_bytes - planner.margin_bytes - bytes_with(model, staying))


def bytes_with(model: Any, staying: int) -> int:
    """The device memory that the weights take if so many layers stay on the device, beside the slots of all others."""
    device_copy = model.megacompile.device_copy
    layers: tuple[TurningLayer, ...] = device_copy.layers()
    program = turns_program(layers)
    beside = device_copy.bytes - copied_bytes(program) + slot_bytes(program)
    return int(beside + staying * max(layer.bytes for layer in layers))


def turning(model: Any) -> int:
    """How many layers of a streamed model's copy take turns."""
    turns = model.megacompile.device_copy.turns
    return 0 if turns is None else len(turns.layers)
