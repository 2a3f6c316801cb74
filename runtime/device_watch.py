"""Ends a process whose caller waits inside CUDA for a rank that has ended.

Waits on the host look at the board and raise `RankError`. A caller that reads `loss.item()`, or copies a batch to the device,
waits inside CUDA for an exchange with the other rank's device. No error can be raised there, so a thread prints the error with
the caller's place and ends the process. All of this must be so at several looks in a row:

- Another rank's process has ended or was stopped. A rank that has failed and still runs may have a checkpoint to complete.
- The caller's thread stands at the same place: it is inside one call, or in a loop around one.
- The device has an exchange to finish. It has none in a rank that evaluates or saves alone after the others have finished.
"""
from __future__ import annotations

import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import CodeType

#: How often the thread looks, in seconds, and at how many looks in a row a caller may stand still. Less than half a minute
#: passes from the other rank's end to the end of this process. Looks are counted and not seconds, because a job that was
#: stopped and goes on must not have waited.
PERIOD_S, LOOKS = 1.0, 8
#: The looks for a caller that an error has told: it may upload logs, or read a loss that never comes.
LOOKS_IF_TOLD = 300
#: How long the device may take to say whether it has exchanges to finish, in seconds.
_ANSWER_S = 5.0


class DeviceWatch:
    """`trouble()`: what has become of another rank's process, or "". `busy()`: whether the device has exchanges to finish.
    `caller()`: the identifier of the thread that calls the model. `told()`: whether an error has told that thread that the
    ranks cannot go on. `end`: what to do with the cause. State: where the caller stood at the last look, and for how many looks
    it has stood there."""

    def __init__(self, trouble: Callable[[], str], busy: Callable[[], bool], caller: Callable[[], int],
                 told: Callable[[], bool], end: Callable[[str, int], None] | None = None) -> None:
        self._trouble, self._busy, self._caller, self._told = trouble, busy, caller, told
        self._end = end or end_process
        self._stood: list[tuple[CodeType, int]] = []
        self._looks = 0
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
        """What has become of another rank, if the caller has waited for it long enough, or ""."""
        cause, stands = self._trouble(), self._stands()
        self._looks = self._looks + 1 if cause and stands == self._stood else 0
        self._stood = stands
        enough = self._looks >= (LOOKS_IF_TOLD if self._told() else LOOKS)
        return cause if enough and self._is_busy() else ""

    def _stands(self) -> list[tuple[CodeType, int]]:
        """Where the caller stands: the code and the instruction of each of its frames."""
        frame = sys._current_frames().get(self._caller())
        return [] if frame is None else [(each.f_code, each.f_lasti) for each, _ in traceback.walk_stack(frame)]

    def _is_busy(self) -> bool:
        # If the caller's call keeps CUDA from answering, nothing in Python can run any more: then C ends the process.
        faulthandler.dump_traceback_later(_ANSWER_S, exit=True, file=sys.__stderr__ or 2)
        busy = self._busy()
        faulthandler.cancel_dump_traceback_later()
        return busy

    def _run(self) -> None:
        while not self._closed.wait(PERIOD_S):
            if (cause := self.look()) and not self._closed.is_set():
                self._end(cause, self._caller())
                return


def end_process(cause: str, caller: int) -> None:
    """Prints the place of the caller's thread and the cause, and ends this process with code 1."""
    try:
        frame = sys._current_frames().get(caller)
        place = "" if frame is None else "".join(traceback.format_stack(frame))
        sys.stdout.flush()
        print(f"This process waits for the device:\n{place}megacompile.errors.RankError: {cause}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)  # the interpreter's own end would wait for the device, too
