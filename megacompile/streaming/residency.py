"""Residency: what lives on the device from section to section, and when it is sent there, or home.

A resident tile has its weights in a slot. Where its optimizer state is there too it is updated there, and then the device is
ahead of the host: the weights go home with every update, the state when somebody asks (`bring_home`, `leave`).
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from megacompile.errors import LaneError
from megacompile.ir.program import stays
from megacompile.runtime.kernels import Batch
from megacompile.runtime.memory.pinning import pin_all

if TYPE_CHECKING:
    from megacompile.streaming.shapes import CompiledShape
    from megacompile.streaming.streamed import Streamed


class Residency:
    """State: `shape`, any of those that the slots were filled for; whether those are `stale` (the host has other weights or
    state); whether the device's optimizer state is ahead of the host's; whether its weights are, which only an update that
    failed leaves behind; and whether the gradients on the device are those of the host."""

    def __init__(self, streamed: Streamed) -> None:
        self.streamed = streamed
        self.shape: CompiledShape | None = None
        self.stale = False
        self.state_ahead = self.weights_ahead = False
        self.gradients_current = False

    def enter(self, shape: CompiledShape) -> None:
        """Before sections of a shape: what its plan has on the device is there and current."""
        if self.shape is not None and self._tiles(self.shape) != self._tiles(shape):
            self.leave()
        if self.shape is None:  # nothing is there; slots that another plan had would be in the way
            kept = {slot for slot in (*shape.program.slots, *self.awaited()) if stays(slot)}
            for slot in [s for s in self.streamed.arena.slots if stays(s) and s not in kept]:
                self.streamed.arena.forget(slot)
        self._lock_visiting(shape)
        if not shape.plan.resident:
            return
        if self.stale:
            self.leave()
        if self.shape is None:
            self._run(shape, "load")
        self.shape = shape

    def awaited(self) -> Iterable[str]:
        """Slots of a step whose update has failed and may yet be completed: a whole step has gradients nowhere else."""
        trained = self.streamed.trained
        return trained.program.slots if trained is not None and self.streamed.unfinished is not None else ()

    def surplus(self, shape: CompiledShape) -> list[str]:
        """Device slots that other shapes have left, or have made larger, if the budget does not hold them beside this shape."""
        arena, planner, own = self.streamed.arena, self.streamed.planner, shape.program.slots
        more = {name: memory.numel() - (own[name].bytes if name in own else 0) for name, memory in arena.slots.items()
                if not arena.is_slab(name)}
        found = {name: size for name, size in more.items() if size > 0}
        if not found or shape.estimate.total + planner.margin_bytes + sum(found.values()) <= planner.device_bytes:
            return []
        return [name for name in found if name not in self.awaited()]

    def _lock_visiting(self, shape: CompiledShape) -> None:
        """Optimizer state that visits the device is pinned, once there is any, unless the user has limited that; copies of
        other memory are right too, and slower."""
        if self.streamed.planner.pinned_bytes is None:
            tiles = map(self.streamed.store.__getitem__, shape.plan.visiting_state)
            pin_all(self.streamed.backend, (part for tile in tiles for part in tile.home.state()))

    def leave(self) -> None:
        """Everything is at home, and is loaded again before it is next used. Lanes are at rest afterwards."""
        with self.streamed.turn:
            self.bring_home()
            self.shape, self.stale, self.gradients_current = None, False, False

    def bring_all_home(self) -> None:
        """As `bring_home`, of weights that are all of one step, with what was written to them from outside."""
        with self.streamed.turn:
            self.bring_home()
            self.streamed.check_whole()
            self.streamed.adopt_writes()  # a remainder is of the weight that was there before

    def bring_home(self) -> None:
        """The host's optimizer state becomes that of the device. Lanes are at rest afterwards."""
        self.streamed.settle()
        if self.state_ahead:
            with self.streamed.guarded():
                self._run(self.shape, "store")
            self.streamed.settle()
            self.state_ahead = False

    def updated(self, shape: CompiledShape) -> None:
        """An update of this shape's program was submitted."""
        self.state_ahead |= bool(shape.plan.resident_state)

    def refresh_gradients(self, shape: CompiledShape) -> None:
        """Before an update: gradients that were changed on the host since the device had them are sent again."""
        if "refresh" in shape.program.sections and not self.gradients_current:
            self._run(shape, "refresh")
            self.gradients_current = True

    def failed(self, done: bool) -> None:
        """A section failed; `done`: after an update had begun. Slots may hold half of what they should; what was updated on
        the device is saved now, or else at the next chance."""
        self.stale = self.shape is not None
        self.weights_ahead |= done and self.state_ahead
        self.rescue()

    def rescue(self) -> None:
        """Weights that a failed update left on the device go home."""
        if not self.weights_ahead or self.streamed.executor.lost is not None:
            return
        executor = self.streamed.executor
        try:
            self._run(self.shape, "rescue")
            executor.idle()
            executor.check()
        except (LaneError, torch.OutOfMemoryError):
            executor.recover()
        else:
            self.streamed.backend.synchronize()
            self.weights_ahead = False

    def _run(self, shape: CompiledShape | None, section: str) -> None:
        assert shape is not None, f"{section} of what was never loaded"
        arena, wanted = self.streamed.arena, shape.slots(section)
        arena.reserve({name: slot for name, slot in wanted.items() if name not in arena.slots})
        self.streamed.submit(shape, section, Batch([], self.streamed.constants.on_device))

    @staticmethod
    def _tiles(shape: CompiledShape) -> tuple[Any, ...]:
        return shape.plan.resident, shape.plan.resident_state
