"""Files that we keep in the user's cache folder, each sealed (`seal.py`), at most so many in a folder."""
from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from megacompile.codegen.seal import unsealed, with_seal
from megacompile.errors import MegacompileError
from megacompile.system.regular_files import open_regular


def read_kept(path: Path, longest: int) -> bytes:
    """The contents of a file that `keep` wrote. Raises `OSError`, and `MegacompileError` if the file was changed, or is longer
    than `longest` bytes."""
    with open(open_regular(path, follow_links=False), "rb") as file:
        contents = unsealed(path.name, file.read(longest))
    if contents is None:
        raise MegacompileError(f"{path} was changed since megacompile wrote it")
    with contextlib.suppress(OSError):
        os.utime(path)
    return contents


def keep(path: Path, contents: bytes, most: int) -> None:
    """Writes a file, and removes all but the `most` files of its folder that were used last. Several processes may do so at
    the same time; the last file stays. Raises `OSError`."""
    path.parent.mkdir(exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(with_seal(path.name, contents))
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    _forget(path.parent, most)


def _forget(folder: Path, most: int) -> None:
    """Leftovers of killed processes go this way too."""
    if len(os.listdir(folder)) <= most:
        return
    used: dict[Path, int] = {}
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            used[path] = path.lstat().st_mtime_ns
    for path in sorted(used, key=used.__getitem__)[:-most]:
        path.unlink(missing_ok=True)
