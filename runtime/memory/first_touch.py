"""Takes the pages of optimizer state before the first update needs them, beside tracing and compiling.

The system zeroes a page when it is first written. The first update of a 7B model would wait for 60 GiB of pages, and longer
where several ranks share memory, whose pages are small.
"""
from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Iterable

import torch
from torch import Tensor

from megacompile.runtime.optimizer import native
from megacompile.system.host_memory import PAGE
from megacompile.system.priority import yield_to_others

#: Bytes that a thread takes before it looks whether it should stop.
_CHUNK = 1 << 26
#: State that is smaller is not worth a thread.
LEAST_BYTES = 1 << 30
_MOST_THREADS = 8


class FirstTouch:
    """State: the memory that is left, and the threads that take it."""

    def __init__(self) -> None:
        self._left: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._stopped = False

    def begin(self, parts: Iterable[Tensor]) -> None:
        """Begins with these parts of host memory, if there is enough of them. Values that are written meanwhile stay."""
        chunks = [chunk for part in parts for chunk in part.view(torch.uint8).split(_CHUNK) if chunk.numel()]
        if sum(chunk.numel() for chunk in chunks) < LEAST_BYTES or (library := native.library()) is None:
            return
        for chunk in chunks:
            self._left.put(chunk)
        threads = [threading.Thread(target=self._work, args=(library,), daemon=True, name="megacompile first touch")
                   for _ in range(max(1, min(_MOST_THREADS, native.default_threads() // 2)))]
        self._threads += threads
        for thread in threads:
            thread.start()

    def _work(self, library: ctypes.CDLL) -> None:
        yield_to_others()
        while not self._stopped:
            try:
                chunk = self._left.get_nowait()
            except queue.Empty:
                return
            library.megacompile_touch(chunk.data_ptr(), chunk.numel(), PAGE)

    def stop(self) -> None:
        """Ends the threads: no memory is used any more when this returns."""
        self._stopped = True
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._left = queue.SimpleQueue()

