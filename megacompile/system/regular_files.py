"""Reads files that other users may have created: opens only regular files.

Opening a FIFO blocks until another process writes to it, and reading a device may never end. A pipe that the user names on the
command line is fine; a file that is found by its name in a folder must be a regular file.
"""
from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from megacompile.errors import ArgumentError

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
