"""The parts of a streamed model's engine that tests watch, delay or break. No other test names where they are."""
from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

#: Each of these takes a model. `of`: the engine itself, where a test replaces or calls a method that has no public name.
of = attrgetter("megacompile.streamed")
activation_checkpoints = attrgetter("megacompile.streamed.activation_checkpoints")
arena = attrgetter("megacompile.streamed.arena")
backend = attrgetter("megacompile.streamed.backend")
binder = attrgetter("megacompile.streamed.binder")
captured = attrgetter("megacompile.streamed.captured")
captures = attrgetter("megacompile.streamed.captures")
config = attrgetter("megacompile.streamed.config")
constants = attrgetter("megacompile.streamed.constants")
executables = attrgetter("megacompile.streamed.executables")
executor = attrgetter("megacompile.streamed.executor")
gradients = attrgetter("megacompile.streamed.gradients")
layouts = attrgetter("megacompile.streamed.tiling.layouts")
optimizer_in_backward = attrgetter("megacompile.streamed.optimizer_in_backward")
planner = attrgetter("megacompile.streamed.planner")
rank_group = attrgetter("megacompile.streamed.rank_group")
residency = attrgetter("megacompile.streamed.residency")
runner = attrgetter("megacompile.streamed.runner")
states = attrgetter("megacompile.streamed.states")
step = attrgetter("megacompile.streamed.step")
store = attrgetter("megacompile.streamed.store")
templates = attrgetter("megacompile.streamed.captured.templates")
tiles = attrgetter("megacompile.streamed.store.tiles")
tiling = attrgetter("megacompile.streamed.tiling")
torn = attrgetter("megacompile.streamed.step.torn")
trained = attrgetter("megacompile.streamed.step.trained")
updating = attrgetter("megacompile.streamed.step.updating")


def probe(model: Any, function: Callable[[Any], object] | None) -> None:
    """Calls `function` before each instruction, in its lane, with its node. What it raises fails the lane."""
    executor(model).probe = function


def delay(model: Any, function: Callable[[Any], object] | None) -> None:
    """Calls `function` after `probe`, with the lane."""
    executor(model).delay = function


def open_forwards(model: Any) -> list[Any]:
    return of(model).forwards.open()  # type: ignore[no-any-return]


def settle(model: Any) -> None:
    """Waits for everything submitted. Unlike `synchronize`, leaves tiles on the device."""
    of(model).settle()
