"""Progress of a command, on stderr: one live line on a terminal, one line for each step elsewhere.

    with Progress() as say:
        say("building the host's kernels")
"""
from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.status import Status

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
