"""The folder of a run belongs to one process at a time: two would spoil each other's log, and remove checkpoints."""
from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from megacompile.errors import ArgumentError
from megacompile.linux import fcntl


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Holds a folder that is there as long as the context, or the process, lasts. Raises `ArgumentError` if another process
    does. A file system without locks cannot tell."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArgumentError(f"another run is writing to {folder}: wait for its end, or give another --output") from None
        except OSError:  # no locks here
            pass
        yield
    finally:
        os.close(descriptor)
