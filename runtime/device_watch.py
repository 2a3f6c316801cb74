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
import traceback
from collections.abc import Callable

#: How often the thread looks, in seconds, and at how many looks in a row an exchange may wait for a rank that has ended. Less
#: than half a minute passes from that rank's end to the end of this process. Looks are counted and not seconds, because a job
#: that was stopped and goes on must not have waited.
PERIOD_S, LOOKS = 1.0, 10


class DeviceWatch:
    """`trouble()`: what has happened to another rank, or "". `busy()`: whether the device has exchanges to finish. `end`: what
    to do with the cause. State: at how many looks in a row exchanges have waited."""

    def __init__(self, trouble: Callable[[], str], busy: Callable[[], bool], end: Callable[[str], None] | None = None) -> None:
        self._trouble, self._busy, self._end = trouble, busy, end or end_process
        self._waited = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="megacompile device watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. It calls nothing afterwards. The thread itself may close it, if it collects a forgotten model."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def look(self) -> str:
        """What has happened to another rank, if exchanges have waited for it at `LOOKS` looks in a row, or ""."""
        cause = self._trouble()
        self._waited = self._waited + 1 if cause and self._busy() else 0
        return cause if self._waited >= LOOKS else ""

    def _run(self) -> None:
        while not self._closed.wait(PERIOD_S):
            if (cause := self.look()) and not self._closed.is_set():
                self._end(cause)
                return


def end_process(cause: str) -> None:
    """Prints the place of the main thread and the cause, and ends this process with code 1."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    place = "".join(traceback.format_stack(frame)) if frame is not None else ""
    print(f"The main thread waits for the device:\n{place}megacompile.errors.RankError: {cause}", file=sys.stderr, flush=True)
    os._exit(1)  # the interpreter's own end would wait for the device, too
