"""What code costs, counted: seconds depend on the machine, and on what else runs there."""
from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def python_calls() -> Iterator[list[int]]:
    """A context that yields a list, which gets the number of Python functions that this thread has called in it."""
    found, count, before = list[int](), 0, sys.getprofile()

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)
        found.append(count)
