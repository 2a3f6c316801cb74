"""Divides the time of a step among its phases, each second counted once."""
from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class PhaseClock:
    """Counts the seconds of phases. A phase that begins inside another one pauses it, so that no second counts twice. Time
    outside of all phases counts as `outside`.

    `wait` is called whenever a phase begins or ends: it waits for the device, whose work then counts for the phase that issued
    it."""

    def __init__(self, wait: Callable[[], None], outside: str) -> None:
        self._wait, self._open = wait, [outside]
        self._seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def begin(self, phase: str) -> None:
        self._count()
        self._open.append(phase)

    def end(self) -> None:
        """Ends the phase that began last."""
        self._count()
        self._open.pop()

    @contextlib.contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """A context whose time counts for a phase."""
        self.begin(phase)
        try:
            yield
        finally:
            self.end()

    def taken(self) -> dict[str, float]:
        """The seconds of each phase since the last call, or since the clock was made."""
        self._count()
        found, self._seconds = self._seconds, {}
        return found

    def _count(self) -> None:
        self._wait()
        now, phase = time.perf_counter(), self._open[-1]
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._since
        self._since = now
