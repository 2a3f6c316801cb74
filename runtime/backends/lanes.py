"""The backend protocol: how a device runs lanes, copies memory, and records events.

An event is a flag on the host, set once the recording lane has *issued* everything before it, and the device's own event if
the lane's work may still be running then. A wait waits for both: a lane that is a device queue makes the device wait, a lane
that works on the host waits for the device.
"""
from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from megacompile.ir.program import Lane
from megacompile.runtime.optimizer.host_update import Moments
from megacompile.runtime.optimizer.rule import Rule, Segment


class Backend(Protocol):
    """The interface of a device. Each method is called in the thread of the lane that it concerns."""

    device: torch.device

    def lane(self, lane: Lane) -> AbstractContextManager[object]:
        """A context that a lane's thread enters once: sets device, stream and grad mode."""

    def memory(self, size: int) -> Tensor:
        """uint8 [size] on the device, for a slot."""

    def pin(self, host: Tensor) -> None:
        """Pins host memory, so that its copies run asynchronously. Idempotent. Raises `InsufficientMemoryError`."""

    def unpin(self, host: Tensor) -> None: ...

    def copy(self, destination: Tensor, source: Tensor, lane: Lane) -> None:
        """Copies uint8 to uint8 of the same size. Issued to the lane; done on return in lanes that work on the host."""

    def norms(self, views: Sequence[Tensor], out: Tensor) -> None:
        """Writes the Euclidean norm of each of n tensors on the device, bf16 or fp32, to `out`, fp32 [n]."""

    def update(self, rule: Rule, weights: Tensor, remainder: Tensor | None, gradient: Tensor,
               segments: Sequence[tuple[Segment, Moments]], gradient_scale: float,
               judged: tuple[Tensor, Tensor] | None = None, lane: Lane = Lane.COMPUTE) -> None:
        """`host_update.update` on tensors of the device, with the same bits, issued to compute or h2d. `judged`: the gradients'
        norms, fp32 [n], and a flag, int32 [1]. If a norm is not finite, nothing is changed and the flag becomes 1."""

    def issuing(self, lane: Lane) -> AbstractContextManager[object]:
        """A context in which PyTorch's operations are issued to compute or h2d."""

    def used_by(self, lane: Lane, memory: Sequence[Tensor]) -> None:
        """Tells PyTorch's allocator that work issued to the lane so far uses memory from compute, which may be dropped then."""

    def record(self, lane: Lane) -> Any:
        """The device's event after everything issued to the lane; None if work is already done when it is issued."""

    def wait(self, lane: Lane, event: Any) -> None:
        """Holds the lane back until the device's event."""

    def busy(self, lane: Lane) -> bool:
        """True if the device has unfinished work of the lane, or has failed. Called in a thread that does nothing else on
        devices."""

    def timestamps(self) -> Timestamps:
        """Starts time stamps of the lanes. The device must be idle."""

    def synchronize(self) -> None:
        """Waits for everything on the device. Raises `LaneError` if the device is lost to this process."""

    def delay(self, lane: Lane, seconds: float) -> None:
        """Delays the lane on purpose. Tests use it to show that events order the lanes."""

    def enter(self, tensors: list[Tensor]) -> None:
        """Called in the caller's thread: compute waits for the caller's stream. The caller may drop the tensors at any time."""

    def exit(self, tensors: list[Tensor], event: Any = None) -> None:
        """Called in the caller's thread: the caller's stream waits for compute; with an `event`, only for the work before it.
        From then on the caller owns the tensors."""

    def peak_bytes(self) -> int:
        """The peak of reserved device memory, in bytes; 0 if the device is the host."""

    def trim(self) -> None:
        """Returns cached free memory to the device, and the workspaces of libraries, which allocate them again. Lanes must be
        idle."""

    def free_bytes(self) -> int:
        """Device memory that could be allocated now, in bytes."""


# -------------------- Time stamps of lanes, on one time scale for all lanes. Used only by recordings (`executor.py`)
class Timestamps(Protocol):
    """Time stamps of lanes. Time 0 is when this object is made; the device must be idle then."""

    def stamp(self, lane: Lane) -> Any:
        """The time at which the lane finishes everything issued to it so far. Called from the lane's thread."""

    def seconds(self, stamp: Any) -> float:
        """A stamp's time in seconds, once the device has passed it."""


class HostTimestamps:
    """Time stamps for lanes whose work is done when it is issued."""

    def __init__(self) -> None:
        self.begin_s = time.perf_counter()

    def stamp(self, lane: Lane) -> float:
        return time.perf_counter()

    def seconds(self, stamp: float) -> float:
        return stamp - self.begin_s


class CudaTimestamps:
    """Time stamps for lanes that are streams of one device, whose stamps are events, and for lanes of the host. The device
    measures the time between events of any of its streams. The host waits for one event, which relates the two time scales. The
    error is some ten microseconds, the time in which that wait returns."""

    def __init__(self, cupy: Any, streams: Mapping[Lane, Any]) -> None:
        self.cupy, self.streams = cupy, streams
        self.begin = self._event(Lane.COMPUTE)
        self.begin.synchronize()
        self.host = HostTimestamps()

    def _event(self, lane: Lane) -> Any:
        event = self.cupy.cuda.Event()  # with timing, and with a spinning wait, which returns sooner
        event.record(self.streams[lane])
        return event

    def stamp(self, lane: Lane) -> Any:
        return self._event(lane) if lane in self.streams else self.host.stamp(lane)

    def seconds(self, stamp: Any) -> float:
        if isinstance(stamp, float):
            return self.host.seconds(stamp)
        return float(self.cupy.cuda.get_elapsed_time(self.begin, stamp)) / 1e3
