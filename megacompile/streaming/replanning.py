"""Makes new plans for a streamed model. Tiles, templates and lanes stay; programs and slots are made again."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from megacompile.errors import MegacompileError
from megacompile.ir.options import named
from megacompile.planning.device import device_budget
from megacompile.streaming.streamed import Streamed

#: The options of `stream` that affect plans alone. The others also decide tiles, kernels or lanes.
OPTIONS = named(lambda row: row.replan)


def replan(streamed: Streamed, **options: Any) -> None:
    """Uses these options for plans from the next step on. Other options stay. Raises `MegacompileError` for an option that is
    not in `OPTIONS` or is out of range, and between a forward and the end of its step; `TornError` after half an update. Then
    nothing has changed."""
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise MegacompileError(f"replan() cannot change {', '.join(unknown)}: it changes {', '.join(OPTIONS)}; for others "
                               "close() the model and stream() it again")
    config = replace(streamed.captures.config, **options)
    config.check_tiles(streamed.tiling.layouts, type(streamed.model).__name__)
    discard_plans(streamed, "replan()")
    streamed.executables.note_budget()
    budget = device_budget(config, streamed.backend.free_bytes())
    streamed.captures.plan_with(config=config, budget_bytes=budget)


def discard_plans(streamed: Streamed, before: str) -> None:
    """Discards all plans, programs and slots. `before`: the next action, for messages. Raises `MegacompileError` between a
    forward and the end of its step, and `TornError` after half an update; then nothing has changed."""
    if streamed.forwards.open():
        raise MegacompileError(f"a loss waits for its backward: run it, or drop the loss, before {before}")
    if streamed.gradients.waiting:
        raise MegacompileError(f"gradients wait for their step: call step() or zero_grad() before {before}")
    streamed.settle()
    streamed.step.check_whole()
    streamed.evict()
    streamed.executables.clear()
    streamed.step.programs_dropped()
    streamed.runner.running = None
    streamed.arena.close()
    streamed.activation_checkpoints.close()
    streamed.store.drop_sums()
    streamed.backend.trim()
