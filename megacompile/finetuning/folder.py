"""The folder of a run belongs to one process at a time: two would spoil each other's log, and remove checkpoints."""
from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megacompile.errors import ArgumentError, MegacompileError
from megacompile.system.linux import fcntl


def check_writable(folder: Path) -> None:
    """Raises `MegacompileError` if a folder could not be made, or nothing could be written in it. Makes nothing that lasts."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise MegacompileError(f"nothing can be saved in {folder} ({error.strerror}): give a directory that can be "
                               "written") from error


@contextlib.contextmanager
def made(folder: Path) -> Iterator[None]:
    """Makes a folder with its parents. Where the block raises, those that were made and are still empty go again.

    Raises `MegacompileError` if nothing can be written there."""
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
