"""Ends a process whose caller waits inside CUDA for a rank that has ended.

Waits on the host look at the board and raise `RankError`. A caller that reads `loss.item()`, or copies a batch to the device,
waits inside CUDA for an exchange with the other rank's device. No error can be raised there, so a thread prints the error with
the caller's place and ends the process.

A rank that works alone after the others have finished, in an evaluation, has no exchange on its device and goes on.
"""
from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

#: How often the thread looks, and for how long an exchange may wait for a rank that has ended, in seconds. Less than half a
#: minute passes from that rank's end to the end of this process.
PERIOD_S, LIMIT_S = 1.0, 10.0


class DeviceWatch:
    """`trouble()`: what has happened to another rank, or "". `busy()`: whether the device has exchanges to finish. `end`: what
    to do with the cause. State: since when exchanges have waited."""

    def __init__(self, trouble: Callable[[], str], busy: Callable[[], bool], end: Callable[[str], None] | None = None) -> None:
        self._trouble, self._busy, self._end = trouble, busy, end or end_process
        self._since: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="megacompile device watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. It calls nothing afterwards."""
        self._closed.set()
        self._thread.join()

    def look(self, now: float) -> str:
        """What has happened to another rank, if exchanges have waited for it for `LIMIT_S` seconds, or ""."""
        cause = self._trouble()
        if not cause or not self._busy():
            self._since = None
            return ""
        if self._since is None:
            self._since = now
        return cause if now - self._since >= LIMIT_S else ""

    def _run(self) -> None:
        while not self._closed.wait(PERIOD_S):
            if cause := self.look(time.monotonic()):
                self._end(cause)
                return


def end_process(cause: str) -> None:
    """Prints the place of the main thread and the cause, and ends this process with code 1."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    place = "".join(traceback.format_stack(frame)) if frame is not None else ""
    print(f"The main thread waits for the device:\n{place}megacompile.errors.RankError: {cause}", file=sys.stderr, flush=True)
    os._exit(1)  # the interpreter's own end would wait for the device, too
