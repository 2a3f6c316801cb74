"""Runs sections of compiled programs on the lanes of one model."""
from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from megacompile.errors import DeviceMemoryError
from megacompile.ir.program import Slot, find
from megacompile.runtime.backends.lanes import Backend
from megacompile.runtime.executor import Executor
from megacompile.runtime.frame import Frame
from megacompile.runtime.kernels import Batch
from megacompile.runtime.memory.arena import Arena
from megacompile.runtime.memory.store import Store
from megacompile.runtime.ranks import Ranks
from megacompile.runtime.reference import ReferenceExecutor
from megacompile.runtime.update import Update
from megacompile.streaming.open_forward import OpenForward
from megacompile.streaming.out_of_memory import allocator_error, device_memory_error
from megacompile.streaming.programs.shapes import CompiledShape, Shapes
from megacompile.streaming.user_tensors.external_writes import Constants


class SectionRunner:
    """State: `running`, the shape of the section that ran last."""

    def __init__(self, executor: Executor | ReferenceExecutor, backend: Backend, store: Store, arena: Arena,
                 shapes: Shapes, constants: Constants, ranks: Ranks | None = None) -> None:
        self.executor, self.backend, self.store, self.arena = executor, backend, store, arena
        self.shapes, self.constants, self.ranks = shapes, constants, ranks
        self.running: CompiledShape | None = None

    def submit(self, shape: CompiledShape, section: str, batch: Batch | None = None, forward: OpenForward | None = None,
               update: Update | None = None) -> Any:
        """Hands a section to the lanes, and returns at once a run that can be waited for. Slots must be reserved."""
        if section not in shape.kernels:
            served = self.shapes.captures.serve(shape.shape.capture_key)
            self.constants.add(served.captured.calls)
            shape.kernels[section] = served.binder.bind(shape.program, section, shape.plan, shape.comes_again)
        self.running = shape
        batch = batch if batch is not None else Batch([], self.constants.on_device)
        held = (forward.values, forward.host) if forward is not None else ({}, {})
        frame = Frame(self.backend, self.store, self.arena, shape.kernels[section], batch, *held, update, self.ranks)
        if self.ranks is not None and any(find(shape.program.section(section), "announce")):
            self.ranks.submitted += 1
        return self.executor.submit(shape.program.section(section), frame, section)

    def forget_run(self) -> None:
        """Errors from now on do not name the plan of the section that ran last."""
        self.running = None

    def lacking(self, slots: Mapping[str, Slot]) -> list[str]:
        """The slots that do not exist, or are too small."""
        made = self.arena.slots
        return [name for name, slot in slots.items() if name not in made or made[name].numel() < slot.bytes]

    def reserve_missing(self, slots: Mapping[str, Slot]) -> None:
        """Makes the slots that do not exist. Slots that hold something stay as they are."""
        self.arena.reserve({name: slot for name, slot in slots.items() if name not in self.arena.slots})

    def forget_slots(self, names: Iterable[str]) -> None:
        for name in names:
            self.arena.forget(name)

    def drain(self, sooner: threading.Event | None = None) -> None:
        """Waits for everything submitted, on the host and on the device; or until the event `sooner`. Raises what a lane failed
        with."""
        self.executor.idle(sooner)
        self.executor.check()
        if sooner is None:
            self.backend.synchronize()

    def out_of_memory(self, error: BaseException, torn: bool) -> DeviceMemoryError | None:
        """The error that users see after a lane or a caller ran out of device memory; None for other errors. The lanes must
        have recovered. `torn`: an update stopped half-way."""
        if isinstance(error, DeviceMemoryError) or (cause := allocator_error(error)) is None:
            return None
        planned = None if self.running is None else (self.running.shape, self.running.estimate.total)
        return device_memory_error(error, cause, planned, self.shapes.planner.device_bytes, self.backend.free_bytes, torn)
