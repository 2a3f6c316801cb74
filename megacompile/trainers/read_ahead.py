"""Reads batches before they are needed, while the device still computes."""
from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any


class ReadAhead(Iterator[Any]):
    """The batches of an iterator, some of which may have been read ahead.

    State: the iterator (`source`), and the batches that were read and not taken yet, or the error that reading one raised."""

    def __init__(self) -> None:
        self._source: Iterator[Any] = iter(())
        self._read: deque[Any] = deque()

    def of(self, source: Iterator[Any]) -> ReadAhead:
        """Iterates over `source` from now on. If that is another iterator than before, drops what was read."""
        if source is not self._source:
            self._source = source
            self._read.clear()
        return self

    def read(self, count: int) -> None:
        """Reads until `count` batches wait, or there are no more. An error of the data is raised when its batch is due, so that
        a step that is complete can still be logged and saved."""
        while len(self._read) < count:
            try:
                self._read.append(next(self._source))
            except StopIteration:
                return
            except Exception as error:  # a dataset or a collator may raise anything
                self._read.append(error)
                return

    def __next__(self) -> Any:
        if not self._read:
            return next(self._source)
        if isinstance(self._read[0], Exception):
            raise self._read.popleft()
        return self._read.popleft()
