"""What a command is doing, on stderr, while it takes long: one live line on a terminal, a line for each thing elsewhere.

    with Progress() as say:
        say("building the host's kernels")
"""
from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.status import Status

#: Takes what is being done now.
Say = Callable[[str], None]


def nothing(_: str) -> None:
    """For callers who do not want to know."""


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
