"""Shows the current work of a command or a call, and its duration, while it runs."""
from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from rich.console import Console
from rich.status import Status

# -------------------- Progress of a command, on stderr: one live line on a terminal, one line for each step elsewhere
#
#     with Progress() as say:
#         say("building the host's kernels")
#: Takes a description of the current step.
Say = Callable[[str], None]


def nothing(_: str) -> None:
    """A `Say` that shows nothing."""


class Progress:
    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
        self._status: Status | None = None

    def __enter__(self) -> Say:
        if self._console.is_terminal:
            self._status = self._console.status("")
            self._status.start()
        return self._say

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def _say(self, what: str) -> None:
        if self._status is not None:
            self._status.update(f"{what} ...")
        else:
            self._console.print(f"{what} ...")


# -------------------- Progress of long library calls: "tracing Zamba2ForCausalLM: model.layers.3, 12 s"
#
#     with under_way("tracing Zamba2ForCausalLM"):
#         at("model.layers.3")
#
# Nothing is shown in the first two seconds. Then a terminal's stderr shows one line, which is removed when the work is done;
# elsewhere the logger "megacompile" gets a record of level INFO, then one each time the elapsed time has doubled. A command
# with its own live display shows the line there (`shown_by`). MEGACOMPILE_PROGRESS=0 turns all of this off.
#: Shorter work shows nothing.
SILENT_S = 2.0
_REFRESH_S = 1.0
_LOG = logging.getLogger("megacompile")


class _Work:
    """State: the current `step`."""

    def __init__(self, task: str) -> None:
        self.task, self.step, self.started = task, "", time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self.started

    def line(self) -> str:
        return f"{self.task}: {f'{self.step}, ' if self.step else ''}{self.seconds():.0f} s"


#: Shows a line in place of the previous one; an empty text removes it.
Show = Callable[[str], None]


def _write(line: str) -> None:
    sys.stderr.write(f"\r{line}\033[K")
    sys.stderr.flush()


_displays: list[Show] = []  # the last one shows lines
_listeners: list[list[tuple[str, float]]] = []
_current: ContextVar[_Work | None] = ContextVar("work under way", default=None)


def at(step: str) -> None:
    """Names the current step of this thread's work. Does nothing where no work is under way."""
    work = _current.get()
    if work is not None:
        work.step = step


@contextlib.contextmanager
def shown_by(show: Show) -> Iterator[None]:
    """A context in which `show` shows the lines of all threads. For displays that redraw a terminal's last lines."""
    _displays.append(show)
    try:
        yield
    finally:
        _displays.remove(show)


@contextlib.contextmanager
def work_done() -> Iterator[list[tuple[str, float]]]:
    """A context that yields a list. The list gets the work of every thread when it ends: its task, and its seconds."""
    done: list[tuple[str, float]] = []
    _listeners.append(done)
    try:
        yield done
    finally:
        _listeners[:] = [each for each in _listeners if each is not done]


@contextlib.contextmanager
def under_way(task: str) -> Iterator[None]:
    """A context in which `task` is shown as under way. Nested work is part of the outer work and is not shown."""
    if _current.get() is not None or os.environ.get("MEGACOMPILE_PROGRESS") == "0":
        yield
        return
    work, done = _Work(task), threading.Event()
    teller = threading.Thread(target=_tell, args=(work, done), name="megacompile progress", daemon=True)
    token = None
    try:  # Ctrl-C may come at any line: work that never ends would hide all later work of this thread
        token = _current.set(work)
        teller.start()
        yield
    finally:
        if token is not None:
            _current.reset(token)
        done.set()
        if teller.ident is not None:
            teller.join()
        for listener in _listeners:
            listener.append((task, work.seconds()))


def _tell(work: _Work, done: threading.Event) -> None:
    if done.wait(SILENT_S):
        return
    if not _displays and not sys.stderr.isatty():
        _log(work, done)
        return
    show = _displays[-1] if _displays else _write
    try:
        while True:
            show(work.line())
            if done.wait(_REFRESH_S):
                break
    finally:
        show("")


def _log(work: _Work, done: threading.Event) -> None:
    while True:
        _LOG.info("%s", work.line())
        if done.wait(work.seconds()):
            return
