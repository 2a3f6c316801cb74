"""Time stamps of lanes, on one time scale for all lanes. Used only by recordings (`recorder.py`)."""
from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from megacompile.ir.program import Lane


class Timestamps(Protocol):
    """Time begins at 0 when this is made; the device must be idle then."""

    def stamp(self, lane: Lane) -> Any:
        """The time at which the lane finishes everything issued to it so far. Called from the lane's thread."""

    def seconds(self, stamp: Any) -> float:
        """A stamp's time in seconds, once the device has passed it."""


class HostTimestamps:
    """For lanes whose work is done when it is issued."""

    def __init__(self) -> None:
        self.begin_s = time.perf_counter()

    def stamp(self, lane: Lane) -> float:
        return time.perf_counter()

    def seconds(self, stamp: float) -> float:
        return stamp - self.begin_s


class CudaTimestamps:
    """For lanes that are streams of one device, whose stamps are events, and for lanes of the host.

    The device measures the time between events of any of its streams. One event, which the host waits for, relates its time
    scale to the host's, with an error of some ten microseconds, the time in which that wait returns."""

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
