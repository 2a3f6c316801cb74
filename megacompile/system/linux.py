"""Modules of Python's library that are complete only on Linux. Import them from here: other systems are then refused with a
clear message."""
from __future__ import annotations

import contextlib
import gc
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from megacompile.errors import UnsupportedError

# -------------------- Keeps garbage collections short while a loop trains, and away from captures
#
# In a full collection Python looks at all objects. Those of torch, transformers, traces and programs take it half a second, and
# that may happen at any step. Objects that stay until the end of training need not be looked at. Nearly all of the objects that
# a capture makes stay until its end, so collections cost time there and find little. The same holds for the program of a new
# shape.
#: Python 3.12 starts with some hundred objects excluded. Whoever excludes objects excludes all that there are, which are more.
_EXCLUDED_AT_START = 1000


class LongLived:
    """A context around a training loop, which calls `after_step`. `made`: a value that changes when a step has made many
    objects that stay, such as the number of compiled kernels. Then garbage is collected, and the remaining objects are excluded
    from collections until the context ends. `added`: a value that changes when a step has made a few more objects that stay,
    such as the number of programs. They are excluded too, after a collection of young objects only. Does nothing if collections
    are switched off, or if other code has excluded objects from them."""

    def __init__(self, made: Callable[[], object], added: Callable[[], object] = lambda: None) -> None:
        self._made, self._added = made, added
        self._seen, self._seen_added = object(), object()
        self._own = False

    def __enter__(self) -> Self:
        self._own = gc.isenabled() and gc.get_freeze_count() <= _EXCLUDED_AT_START
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._own:
            gc.unfreeze()

    def after_step(self) -> None:
        """Call this after each step."""
        if not self._own:
            return
        made, added = self._made(), self._added()
        if (made, added) != (self._seen, self._seen_added):
            gc.collect(2 if made != self._seen else 1)  # garbage of this moment would be excluded too
            gc.freeze()
        self._seen, self._seen_added = made, added


@contextlib.contextmanager
def collections_paused() -> Iterator[None]:
    """A context in which no thread's garbage is collected. Does nothing if collections are switched off already."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


_REMEDY = "use a Linux machine or container"

if sys.platform != "linux":
    raise UnsupportedError(f"megacompile runs on Linux, and this is {platform.system()}: {_REMEDY}")

try:
    import fcntl as fcntl
    import resource as resource
except ModuleNotFoundError as error:
    raise UnsupportedError(f"megacompile runs on Linux, and this {platform.system()} has a Python without {error.name}: "
                           f"{_REMEDY}") from None


# -------------------- Thread priorities, for machines with more busy threads than cores
#: Added to the niceness of the threads that update weights. The training loop prepares the next batch while they run. At equal
#: priority, each of its PyTorch operations on more than 32,768 elements waits some milliseconds for a core.
UPDATE_NICENESS = 5


def yield_to_others() -> None:
    """Lowers the priority of the calling thread and of the threads that it starts from now on, including OpenMP's."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # a sandbox may forbid it; this only costs speed
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + UPDATE_NICENESS)
