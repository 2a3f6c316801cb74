"""Residency: which tiles stay on the device from section to section, and which copy of them is newer.

A resident tile has its weights in a slot. Where its optimizer state is there too, the tile is updated there, and then the
device is ahead of the host: weights are copied back with every update, the state only when `store_state` runs.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from megacompile.errors import LaneError
from megacompile.ir.program import stays
from megacompile.runtime.memory.pinning import pin_all
from megacompile.streaming.programs.shapes import CompiledShape
from megacompile.streaming.section_runner import SectionRunner
from megacompile.streaming.step_state import StepState


class Residency:
    """State: `shape`, one of those that the slots were filled for; None: nothing is on the device. `stale`: the host has newer
    weights or state. `state_ahead`: the device has newer optimizer state. `weights_ahead`: the device has newer weights, which
    only a failed update leaves behind."""

    def __init__(self, runner: SectionRunner, step: StepState) -> None:
        self.runner, self.step = runner, step
        self.shape: CompiledShape | None = None
        self.stale = self.state_ahead = self.weights_ahead = False

    # ---------------------------------------------------------------- to the device
    def must_leave(self, shape: CompiledShape) -> bool:
        """Whether the tiles on the device cannot serve this shape: its plan keeps others there, or the host has newer ones."""
        if self.shape is None:
            return False
        return _tiles(self.shape) != _tiles(shape) or (self.stale and bool(shape.plan.resident))

    def load(self, shape: CompiledShape, wait_for_updates: Callable[[], None]) -> None:
        """Loads the tiles that the shape's plan keeps on the device, before its sections run. Call `must_leave` first, and
        move the tiles on the device to the host if it is true. `wait_for_updates` waits until the host's tiles have the updates
        of all ranks."""
        if self.shape is None:  # slots that another plan had would be in the way
            kept = {slot for slot in (*shape.program.slots, *self.awaited()) if stays(slot)}
            self.runner.forget_slots([slot for slot in self.runner.arena.slots if stays(slot) and slot not in kept])
        self._pin_visiting(shape)
        if not shape.plan.resident:
            return
        if self.shape is None:
            wait_for_updates()
            self._run(shape, "load")
        self.shape = shape

    def left(self) -> None:
        """All tiles were copied to the host. The next use loads them again."""
        self.shape, self.stale = None, False
        self.step.gradients_changed()

    def awaited(self) -> Iterable[str]:
        """Slots of a step whose update has failed and may yet be completed: a whole step has gradients nowhere else."""
        trained = self.step.trained
        return trained.program.slots if trained is not None and self.step.unfinished is not None else ()

    def surplus(self, shape: CompiledShape) -> list[str]:
        """Device slots that other shapes have left, or have made larger, if the budget does not hold them beside this shape."""
        arena, own = self.runner.arena, shape.program.slots
        more = {name: memory.numel() - (own[name].bytes if name in own else 0) for name, memory in arena.slots.items()
                if not arena.is_slab(name)}
        found = {name: size for name, size in more.items() if size > 0}
        planner = self.runner.shapes.planner
        if not found or shape.estimate.total + planner.margin_bytes + sum(found.values()) <= planner.device_bytes:
            return []
        return [name for name in found if name not in self.awaited()]

    def _pin_visiting(self, shape: CompiledShape) -> None:
        """Pins optimizer state that visits the device, once there is any, unless the user has limited pinned memory. Copies of
        memory that is not pinned are correct too, and slower."""
        if self.runner.shapes.planner.pinned_bytes is None:
            tiles = map(self.runner.store.__getitem__, shape.plan.visiting_state)
            pin_all(self.runner.backend, (part for tile in tiles for part in tile.home.state()))

    def refresh_gradients(self, shape: CompiledShape) -> None:
        """Before an update: sends gradients again that were changed on the host since the device had them."""
        if "refresh" in shape.program.sections and not self.step.gradients_on_device:
            self._run(shape, "refresh")
            self.step.gradients_stored()

    # ---------------------------------------------------------------- to the host
    def updated(self, shape: CompiledShape) -> None:
        """An update of this shape's program was submitted."""
        self.state_ahead |= bool(shape.plan.resident_state)

    def store_state(self) -> None:
        """Copies the device's optimizer state to the host. `stored_state` follows once the lanes are idle."""
        self._run(self.shape, "store")

    def stored_state(self) -> None:
        self.state_ahead = False

    def failed(self, updated: bool) -> None:
        """A section failed. `updated`: after an update had changed tiles. Slots may hold half of what they should. Weights that
        were updated on the device are saved now, or else at the next chance."""
        self.stale = self.shape is not None
        self.weights_ahead |= updated and self.state_ahead
        self.rescue()

    def rescue(self) -> None:
        """Copies weights that a failed update left on the device to the host."""
        executor = self.runner.executor
        if not self.weights_ahead or executor.lost is not None:
            return
        try:
            self._run(self.shape, "rescue")
            executor.idle()
            executor.check()
        except (LaneError, torch.OutOfMemoryError):
            executor.recover()
        else:
            self.runner.backend.synchronize()
            self.weights_ahead = False

    def _run(self, shape: CompiledShape | None, section: str) -> None:
        assert shape is not None, f"{section} of what was never loaded"
        self.runner.reserve_missing(shape.slots(section))
        self.runner.submit(shape, section)


def _tiles(shape: CompiledShape) -> tuple[Any, ...]:
    return shape.plan.resident, shape.plan.resident_state
