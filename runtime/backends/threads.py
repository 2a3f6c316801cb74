"""The CPU as a device: "device" memory is host memory, copies are memcpy, and work is done when it is issued."""
from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from megacompile.ir.program import Lane
from megacompile.runtime.backends.lanes import HostTimestamps, Timestamps
from megacompile.runtime.optimizer import host_update
from megacompile.runtime.optimizer import host_update as host
from megacompile.runtime.optimizer.host_update import Moments
from megacompile.runtime.optimizer.rule import Rule, Segment
from megacompile.system.host_memory import available_host_bytes, cores, host_memory


class ThreadBackend:
    """Lanes that are threads. On a CPU there is little overlap, but the same races as on any device, so tests find them
    here."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        if torch.get_num_threads() > cores():
            warnings.warn(f"torch computes with {torch.get_num_threads()} threads on {cores()} cores, which is slower than "
                          f"with as many as there are: set OMP_NUM_THREADS={cores()}", RuntimeWarning, stacklevel=4)

    def lane(self, lane: Lane) -> AbstractContextManager[object]:
        return torch.no_grad()

    def memory(self, size: int) -> Tensor:
        return host_memory(size)

    def pin(self, host: Tensor) -> None:
        pass  # no device copies from it

    def unpin(self, host: Tensor) -> None:
        pass

    def copy(self, destination: Tensor, source: Tensor, lane: Lane) -> None:
        destination.copy_(source)

    def norms(self, views: Sequence[Tensor], out: Tensor) -> None:
        # On the CPU PyTorch sums the squares sequentially in FP32: the norm is 0.5% too small at 67 million elements.
        for position, view in enumerate(views):
            out[position] = host.norm(view.flatten())

    def update(self, rule: Rule, weights: Tensor, remainder: Tensor | None, gradient: Tensor,
               segments: Sequence[tuple[Segment, Moments]], gradient_scale: float,
               judged: tuple[Tensor, Tensor] | None = None, lane: Lane = Lane.COMPUTE) -> None:
        if judged is not None and not judged[0].isfinite().all():
            judged[1].fill_(1)
            return
        host_update.update(rule, weights, remainder, gradient, segments, gradient_scale)

    def issuing(self, lane: Lane) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def used_by(self, lane: Lane, memory: Sequence[Tensor]) -> None:
        """Nothing: work is done when it is issued."""

    def record(self, lane: Lane) -> Any:
        return None

    def wait(self, lane: Lane, event: Any) -> None:
        pass

    def busy(self, lane: Lane) -> bool:
        return False  # work is done when it is issued

    def timestamps(self) -> Timestamps:
        return HostTimestamps()

    def synchronize(self) -> None:
        pass

    def delay(self, lane: Lane, seconds: float) -> None:
        time.sleep(seconds)

    def enter(self, tensors: list[Tensor]) -> None:
        pass

    def exit(self, tensors: list[Tensor], event: Any = None) -> None:
        pass

    def peak_bytes(self) -> int:
        return 0

    def trim(self) -> None:
        pass  # nothing is kept

    def free_bytes(self) -> int:
        return available_host_bytes()
