"""Temporary folders whose contents are renamed into place when they are complete. The process that works in one holds its lock.
The system drops the lock when the process ends in any way, so a folder that can be locked is abandoned."""
from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from megacompile.system.linux import fcntl


class WorkingFolder:
    """A new, locked folder. State: the lock, a descriptor; None where the file system has no locks."""

    def __init__(self, directory: Path, prefix: str) -> None:
        """Raises `OSError`."""
        while True:
            self.path = unused(directory, prefix)
            self.path.mkdir()
            self._lock = _locked(self.path)
            try:
                if self.path.exists():  # no other process has removed it before it was locked
                    break
            except BaseException:
                self.release()
                raise
            self.release()

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def unused(directory: Path, prefix: str) -> Path:
    return directory / f"{prefix}{secrets.token_hex(6)}"


def abandoned(directory: Path, prefix: str) -> Iterator[Path]:
    """Yields the folders of dead processes, each locked until the next one is requested. Yields none where the file system has
    no locks."""
    for path in sorted(directory.iterdir()):
        if not path.name.startswith(prefix):
            continue
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # not a folder, or already removed
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another process works there, or the file system has no locks
            continue
        else:
            yield path
        finally:
            os.close(lock)


def _locked(path: Path) -> int | None:
    """A descriptor that holds a folder's lock. None if the folder is gone, or the file system has no locks; then no process
    removes abandoned folders."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
