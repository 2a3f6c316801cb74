"""Files: read from regular files only, written atomically, and folders that are renamed into place when they are complete."""
from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from megacompile.errors import ArgumentError
from megacompile.system.linux import fcntl

# -------------------- Reads files that other users may have created: opens only regular files
#
# Opening a FIFO blocks until another process writes to it, and reading a device may never end. A pipe that the user names on
# the command line is fine; a file that is found by its name in a folder must be a regular file.
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
          stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link, which is not followed"}


def open_regular(path: Path, *, follow_links: bool = True) -> int:
    """A descriptor for reading. Does not block.

    Raises `OSError` for anything but a regular file, and for a link unless `follow_links`; `strerror` says what it is. Hugging
    Face caches hold links to files; checkpoints of our runs do not."""
    _require_regular(path, os.stat(path, follow_symlinks=follow_links))
    links = 0 if follow_links else os.O_NOFOLLOW
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | links)
    try:
        _require_regular(path, os.fstat(descriptor))  # it may have been replaced since
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: Path, *, follow_links: bool = True) -> bytes:
    """The contents of a file. Raises `OSError` as `open_regular` does."""
    with open(open_regular(path, follow_links=follow_links), "rb") as file:
        return file.read()


def refuse_irregular(source: Path) -> None:
    """Raises `ArgumentError` if a file, or a file directly in a folder, is a FIFO, a socket or a device: libraries that read it
    would block forever. Links are followed; subfolders are not checked."""
    path = source
    try:
        for path in sorted(source.iterdir()) if source.is_dir() else (source,):
            if path.exists() and not path.is_dir():
                _require_regular(path, path.stat())
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read ({error.strerror}): give regular files") from error


def _require_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file" if "link" not in kind else f"it is {kind}", str(path))


# -------------------- Atomic file writes: a file has its old or its new contents, whenever the process or the machine stops
def replace_file(path: Path, parts: Iterable[bytes]) -> None:
    """Writes `parts` to a new file beside `path`, then renames it to `path`; on return it is on the disk. A link stays a link:
    its target is replaced. Only one process at a time may write a file. Raises `OSError`; the file is then unchanged."""
    path = path.resolve()
    new = path.with_name(f".{path.name}.new")
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        with open(descriptor, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(descriptor)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Returns once the names in a folder are on the disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --------------------
# Temporary folders whose contents are renamed into place when they are complete. The process that works in one holds its lock.
# The system drops the lock when the process ends in any way, so a folder that can be locked is abandoned.
class WorkingFolder:
    """A new, locked folder. State: the lock, a descriptor; None if the file system has no locks."""

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
    """Yields the folders of dead processes, each locked until the next one is requested. Yields none if the file system has no
    locks."""
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
