"""What a forward holds until its backward: kept activations, and buffers for checkpoints in host memory."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megacompile.errors import LeaseError
from megacompile.ir.program import Kept
from megacompile.runtime.kernels import Activation, Batch
from megacompile.runtime.memory.arena import Accumulators
from megacompile.runtime.memory.checkpoints import HostCheckpoint
from megacompile.streaming.programs.shapes import CompiledShape


@dataclass(eq=False)
class OpenForward:
    """A forward whose backward has not run. `version`: of the weights that it read. `values`: kept activations, and gradients
    that the epilogue has computed already, by the call and micro-batch, or the tile, of each. `host`: buffers in host memory,
    by slot, for checkpoints. `give_back` returns these buffers; it runs at the latest when the object dies."""

    shape: CompiledShape
    batch: Batch
    version: int
    values: dict[Kept, Any] = field(default_factory=dict)
    host: Mapping[str, HostCheckpoint] = field(default_factory=dict)
    give_back: Callable[[], object] = lambda: None
    closed: bool = False

    def check_open(self, version: int | None) -> None:
        """Raises `LeaseError` if its backward cannot run any more. `version`: of the weights now; None: just changed."""
        if self.closed:
            raise LeaseError("this loss was already used by a backward, or its backward was refused: run the forward again "
                             "(retain_graph is not supported, since the backward frees activations as it runs)")
        if self.version != version:
            raise LeaseError("the weights have changed since this loss was computed: run backward before optimizer.step(), "
                             "or the forward again")

    def end(self) -> None:
        """Releases everything. The batch itself is kept until the update, which may dump it."""
        self.values.clear()
        self.batch.output_gradients = ()  # of logits, gigabytes
        self.give_back()

    @property
    def device_bytes(self) -> int:
        """Device memory that this forward keeps from others. Memory that several values share counts once."""
        tensors: list[Any] = []
        for value in self.values.values():
            if isinstance(value, Activation):
                tensors += [*value.outputs, *value.residuals]
            elif isinstance(value, Accumulators):
                tensors.append(value.flat)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor)}
        return sum(storages.values())
