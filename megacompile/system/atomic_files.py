"""Atomic file writes: a file has its old or its new contents, whenever the process or the machine stops."""
from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


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
