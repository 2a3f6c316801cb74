"""The memory that a forward holds until its backward: kept activations, and buffers for checkpoints in host memory."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megacompile.errors import InsufficientMemoryError, LeaseError
from megacompile.ir.program import Kept
from megacompile.planning.planner import Planner
from megacompile.runtime.kernels import Activation, Batch
from megacompile.runtime.memory.activation_checkpoints import HostCheckpoint
from megacompile.runtime.memory.arena import Accumulators
from megacompile.sizes import format_bytes
from megacompile.streaming.programs.executables import Executable


@dataclass(eq=False)
class OpenForward:
    """A forward whose backward has not run. `version`: of the weights that it read. `values`: kept activations, and gradients
    that the epilogue has already computed, keyed by call and micro-batch, or by tile. `host`: buffers in host memory for
    checkpoints, by slot. `give_back` returns these buffers. It runs at the latest when the object is freed."""

    executable: Executable
    batch: Batch
    version: int
    values: dict[Kept, Any] = field(default_factory=dict)
    host: Mapping[str, HostCheckpoint] = field(default_factory=dict)
    give_back: Callable[[], object] = lambda: None
    closed: bool = False

    def check_open(self, version: int | None) -> None:
        """Raises `LeaseError` if the backward can no longer run. `version`: of the current weights; None: they have just
        changed."""
        if self.closed:
            raise LeaseError("this loss was already used by a backward, or its backward was refused: run the forward again "
                             "(retain_graph is not supported, since the backward frees activations as it runs)")
        if self.version != version:
            raise LeaseError("the weights have changed since this loss was computed: run backward before optimizer.step(), "
                             "or the forward again")

    def close(self) -> None:
        """Refuses the backward from now on. The forward no longer counts as open."""
        self.closed = True

    def end(self) -> None:
        """Releases everything except the batch, which is kept until the update, since the update may dump it."""
        self.values.clear()
        self.batch.output_gradients = ()  # of logits, gigabytes
        self.give_back()

    @property
    def device_bytes(self) -> int:
        """Device memory that this forward holds. Memory that several values share counts once."""
        tensors: list[Any] = []
        for value in self.values.values():
            if isinstance(value, Activation):
                tensors += [*value.outputs, *value.residuals]
            elif isinstance(value, Accumulators):
                tensors.append(value.flat)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor)}
        return sum(storages.values())


class OpenForwards:
    """The forwards of a model whose backward has not run. State: those that the caller still references."""

    def __init__(self) -> None:
        self._forwards: weakref.WeakSet[OpenForward] = weakref.WeakSet()

    def add(self, forward: OpenForward) -> None:
        self._forwards.add(forward)

    def release(self) -> None:
        """Ends all forwards, when the model is closed. No backward can run any more."""
        for forward in self._forwards:
            forward.end()
            forward.batch.release()

    def open(self) -> list[OpenForward]:
        return [forward for forward in self._forwards if not forward.closed]

    @property
    def device_bytes(self) -> int:
        return sum(forward.device_bytes for forward in self.open())

    def leave_room(self, executable: Executable, planner: Planner) -> bool:
        """True if the program's sections fit beside the open forwards. The planner has checked that they fit alone."""
        held = self.device_bytes
        return not held or executable.estimate.total + planner.margin_bytes + held <= planner.device_bytes

    def check_room(self, executable: Executable, planner: Planner) -> None:
        """Raises `InsufficientMemoryError` if the program's sections do not fit beside the open forwards."""
        if not self.leave_room(executable, planner):
            spec, needed, held = executable.spec, executable.estimate.total + planner.margin_bytes, self.device_bytes
            raise InsufficientMemoryError(
                f"a batch of {spec.batch} x {spec.length} needs {format_bytes(needed)} of device memory and "
                f"{format_bytes(planner.device_bytes - held)} are available, since forwards without their backward hold "
                f"{format_bytes(held)}: run backward (or drop the loss) before the next forward, or give more device_memory")
