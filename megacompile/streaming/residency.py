"""Residency: which tiles stay on the device from section to section, and which copy of them is newer.

A resident tile has its weights in a slot. Where its optimizer state is there too, the tile is updated there, and then the
device is ahead of the host: weights are copied back with every update, the state only when `store_state` runs.
"""
from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from megacompile.errors import DeviceMemoryError, LaneError, first_line
from megacompile.ir.plan import BatchSpec
from megacompile.ir.program import Slot, find, stays
from megacompile.runtime.backends.lanes import Backend
from megacompile.runtime.executor import Executor
from megacompile.runtime.frame import Frame
from megacompile.runtime.kernels import Batch
from megacompile.runtime.memory.arena import Arena, pin_all
from megacompile.runtime.memory.store import Store
from megacompile.runtime.ranks import Ranks
from megacompile.runtime.reference import ReferenceExecutor
from megacompile.runtime.update import Update
from megacompile.sizes import format_bytes
from megacompile.streaming.open_forward import OpenForward
from megacompile.streaming.programs.executables import Executable, Executables
from megacompile.streaming.step_state import StepState
from megacompile.streaming.user_tensors.external_writes import Constants


# --------------------
# Out of device memory in the middle of a step: the step is abandoned, its memory is released, and the error has numbers.
def allocator_error(error: BaseException) -> torch.OutOfMemoryError | None:
    """The allocator's error, if it made a lane or a caller fail."""
    cause = error if isinstance(error, torch.OutOfMemoryError) else error.__cause__
    return cause if isinstance(cause, torch.OutOfMemoryError) else None


def device_memory_error(error: BaseException, cause: torch.OutOfMemoryError, planned: tuple[BatchSpec, int] | None, budget: int,
                        free_bytes: Callable[[], int], torn: bool) -> DeviceMemoryError:
    """The error for the caller. `planned`: what ran was made for, and the device bytes that its plan predicted. Frees what the
    frames of the failed instruction hold, since the caller may keep the error while it runs a smaller batch."""
    traceback.clear_frames(cause.__traceback__)
    predicted = "" if planned is None else (
        f"; the plan for {planned[0].batch} x {planned[0].length} tokens predicted {format_bytes(planned[1])}")
    changed = "the weights are torn" if torn else "no weight has changed"
    where = first_line(error).split(":")[0] if error is not cause else "making a slot or a result"
    return DeviceMemoryError(
        f"out of device memory ({where}){predicted}, and the budget is {format_bytes(budget)}; {changed}: "
        "run a smaller batch, or stream() with less device_memory, so that plans leave room for other programs on the device\n"
        f"{format_bytes(free_bytes())} are free now; the allocator said: {first_line(cause)}")


# -------------------- Runs sections of compiled programs on the lanes of one model
class SectionRunner:
    """State: `running`, the program of the section that ran last, which errors name; and `in_flight`, the sections submitted
    since all lanes were last idle."""

    def __init__(self, executor: Executor | ReferenceExecutor, backend: Backend, store: Store, arena: Arena,
                 executables: Executables, constants: Constants, ranks: Ranks | None = None) -> None:
        self.executor, self.backend, self.store, self.arena = executor, backend, store, arena
        self.executables, self.constants, self.ranks = executables, constants, ranks
        self.running: Executable | None = None
        self.in_flight: list[str] = []

    def submit(self, executable: Executable, section: str, batch: Batch | None = None, forward: OpenForward | None = None,
               update: Update | None = None) -> Any:
        """Hands a section to the lanes, and returns a run to wait for. Slots must be reserved."""
        if section not in executable.kernels:
            served = self.executables.captures.serve(executable.spec.capture)
            self.constants.add(served.captured.calls)
            executable.kernels[section] = served.binder.bind(executable.program, section, executable.plan,
                                                             executable.comes_again)
        self.running = executable
        self.in_flight.append(section)
        batch = batch if batch is not None else Batch([], self.constants.on_device)
        held = (forward.values, forward.host) if forward is not None else ({}, {})
        frame = Frame(self.backend, self.store, self.arena, executable.kernels[section], batch, *held, update, self.ranks)
        if self.ranks is not None and any(find(executable.program.section(section), "announce")):
            self.ranks.submitted += 1
        return self.executor.submit(executable.program.section(section), frame, section)

    def lacking(self, slots: Mapping[str, Slot]) -> list[str]:
        """The slots that do not exist or are too small."""
        made = self.arena.slots
        return [name for name, slot in slots.items() if name not in made or made[name].numel() < slot.bytes]

    def drain(self, sooner: threading.Event | None = None) -> None:
        """Waits for everything submitted, on the host and on the device, or until the event `sooner`. Raises the failure of a
        lane."""
        self.executor.idle(sooner)
        self.executor.check()
        if sooner is None:
            self.backend.synchronize()
            self.in_flight.clear()

    def out_of_memory(self, error: BaseException, torn: bool) -> DeviceMemoryError | None:
        """The error that users see after a lane or a caller ran out of device memory; None for other errors. The lanes must
        have recovered. `torn`: an update stopped half-way."""
        if isinstance(error, DeviceMemoryError) or (cause := allocator_error(error)) is None:
            return None
        planned = None if self.running is None else (self.running.spec, self.running.estimate.total)
        return device_memory_error(error, cause, planned, self.executables.planner.device_bytes, self.backend.free_bytes, torn)


class Residency:
    """State: `executable`, one of those that the slots were filled for (None: the device holds no tiles). `stale`: the host has
    newer weights or state. `state_ahead`: the device has newer optimizer state. `weights_ahead`: the device has newer weights.
    This happens only after a failed update."""

    def __init__(self, runner: SectionRunner, step: StepState) -> None:
        self.runner, self.step = runner, step
        self.executable: Executable | None = None
        self.stale = self.state_ahead = self.weights_ahead = False

    # ---------------------------------------------------------------- to the device
    def must_leave(self, executable: Executable) -> bool:
        """True if the tiles on the device cannot serve this program: its plan keeps other tiles there, or the host has newer
        ones."""
        if self.executable is None:
            return False
        return _tiles(self.executable) != _tiles(executable) or (self.stale and bool(executable.plan.resident))

    def load(self, executable: Executable, wait_for_updates: Callable[[], None]) -> None:
        """Loads the tiles that the program keeps on the device, before its sections run. Call `must_leave` first, and move
        the tiles on the device to the host if it is true. `wait_for_updates` waits until the host's tiles have the updates of
        all ranks."""
        if self.executable is None:  # slots that another plan had would be in the way
            kept = {slot for slot in (*executable.program.slots, *self.awaited()) if stays(slot)}
            self.runner.arena.forget(*(slot for slot in self.runner.arena.slots if stays(slot) and slot not in kept))
        self._pin_visiting(executable)
        if not executable.plan.resident:
            return
        if self.executable is None:
            wait_for_updates()
            self.runner.drain()  # the state of tiles that the device held may still be returning
            self._run(executable, "load")
        self.executable = executable

    def left(self) -> None:
        """Records that all tiles were copied to the host. The next use loads them again."""
        self.executable, self.stale = None, False
        self.step.gradients_changed()

    def awaited(self) -> Iterable[str]:
        """Slots of a step whose update has failed and may still be completed. The gradients of a whole step are only there."""
        trained = self.step.trained
        return trained.program.slots if trained is not None and self.step.unfinished is not None else ()

    def surplus(self, executable: Executable) -> list[str]:
        """Device slots of other programs, and slots that they have made larger, if the budget does not hold them beside this
        program."""
        arena, own = self.runner.arena, executable.program.slots
        more = {name: memory.numel() - (own[name].bytes if name in own else 0) for name, memory in arena.slots.items()
                if not arena.is_slab(name)}
        found = {name: size for name, size in more.items() if size > 0}
        planner = self.runner.executables.planner
        if not found or executable.estimate.total + planner.margin_bytes + sum(found.values()) <= planner.device_bytes:
            return []
        return [name for name in found if name not in self.awaited()]

    def _pin_visiting(self, executable: Executable) -> None:
        """Pins optimizer state that visits the device, once it exists, unless the user has limited pinned memory. Copies of
        memory that is not pinned are also correct, but slower."""
        if self.runner.executables.planner.pinned_bytes is None:
            tiles = map(self.runner.store.__getitem__, (*executable.plan.visiting_state, *executable.plan.held_state))
            pin_all(self.runner.backend, (part for tile in tiles for part in tile.home.state()))

    def refresh_gradients(self, executable: Executable) -> None:
        """Sends gradients that changed on the host to the device again. Called before an update."""
        if "refresh" in executable.program.sections and not self.step.gradients_on_device:
            self._run(executable, "refresh")
            self.step.gradients_stored()

    # ---------------------------------------------------------------- to the host
    def updated(self, executable: Executable) -> None:
        """Records that an update of this program was submitted."""
        self.state_ahead |= bool(executable.plan.resident_state)

    def store_state(self) -> None:
        """Copies the device's optimizer state to the host. `stored_state` follows once the lanes are idle."""
        self._run(self.executable, "store")

    def stored_state(self) -> None:
        self.state_ahead = False

    def failed(self, updated: bool) -> None:
        """Handles a failed section. `updated`: an update had already changed tiles. Slots may be half written. Saves weights
        that were updated on the device now, or at the next opportunity."""
        self.stale = self.executable is not None
        self.runner.arena.drop_held()
        self.weights_ahead |= updated and self.state_ahead
        self.rescue()

    def rescue(self) -> None:
        """Copies weights that a failed update left on the device to the host."""
        executor = self.runner.executor
        if not self.weights_ahead or executor.lost is not None:
            return
        try:
            self._run(self.executable, "rescue")
            executor.idle()
            executor.check()
        except (LaneError, torch.OutOfMemoryError):
            executor.recover()
        else:
            self.runner.backend.synchronize()
            self.weights_ahead = False

    def _run(self, executable: Executable | None, section: str) -> None:
        assert executable is not None, f"{section} of what was never loaded"
        arena = self.runner.arena  # slots in use stay as they are
        arena.reserve({name: slot for name, slot in executable.slots(section).items() if name not in arena.slots})
        self.runner.submit(executable, section)


def _tiles(executable: Executable) -> tuple[Any, ...]:
    return executable.plan.resident, executable.plan.resident_state
