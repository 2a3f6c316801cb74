"""Creates and locks the folder of a run.

Only one process at a time may use it: two would corrupt each other's log and remove each other's checkpoints.
"""
from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megacompile.errors import ArgumentError, MegacompileError
from megacompile.system.linux import fcntl


def check_writable(folder: Path) -> None:
    """Raises `MegacompileError` if the folder cannot be created or written to. Leaves nothing behind."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise MegacompileError(f"nothing can be saved in {folder} ({error.strerror}): give a directory that can be "
                               "written") from error


@contextlib.contextmanager
def created(folder: Path) -> Iterator[None]:
    """Creates a folder with its parents. If the block raises, removes those that were created and are still empty.

    Raises `MegacompileError` if the folder cannot be written to."""
    check_writable(folder)
    new = [each for each in (folder, *folder.absolute().parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for each in new:
            with contextlib.suppress(OSError):
                each.rmdir()
        raise


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks an existing folder until the context or the process ends. Raises `ArgumentError` if another process has locked it.
    On a file system without locks, does nothing."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArgumentError(f"another run is writing to {folder}: wait for its end, or give another --output") from None
        except OSError:  # the file system has no locks
            pass
        yield
    finally:
        os.close(descriptor)
