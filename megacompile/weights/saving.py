"""Saving a checkpoint so that its folder always has a whole one: the new one is written beside, then both change places.

Folders of the user's in it, such as checkpoints of a run, cannot be in both. Each moves into the new folder before the
exchange, by changing places with a link that leads to it there: it can be reached by its own name at every moment, and is a
plain folder again after the exchange. What a killed process has left, `.NAME.saving-...` beside and links into it, the next
save or start of a run puts back and removes (`recover`); until then such a folder may hold a folder of the user's.
"""
from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from megacompile.errors import CheckpointError
from megacompile.system.atomic_files import sync_folder
from megacompile.system.working_folders import WorkingFolder, abandoned

#: Small enough that a shard more of host memory is no matter, where the safetensors library copies what it writes.
MAX_SHARD_SIZE = "5GB"
_SHARD = re.compile(r"-\d{5}-of-\d{5}")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def save_whole(save: Callable[..., Any], directory: str | os.PathLike[str], **options: Any) -> Any:
    """`save(directory, **options)`, the `save_pretrained` of a transformers model, whose files come into being all at once.
    What else lies in the directory stays; shards of an older checkpoint go."""
    if not options.get("is_main_process", True):
        return save(directory, **options)
    if options.get("push_to_hub"):
        options.setdefault("repo_id", Path(directory).resolve().name)  # not that of the folder that is written
    with replacing(Path(directory)) as folder:
        return save(str(folder), **{"max_shard_size": MAX_SHARD_SIZE, **options})


@contextlib.contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """A new folder, whose files are those of `directory` once the block has ended, on disk and all at once. Where it raises,
    `directory` is as it was. Raises `CheckpointError` for what the system refuses."""
    target, working = directory.resolve(), None
    try:
        if target.exists() and not target.is_dir():
            raise CheckpointError(f"{directory} is a file: give a folder to save in")
        target.parent.mkdir(parents=True, exist_ok=True)
        recover(target)
        working = WorkingFolder(_place(target), _prefix(target))
        yield working.path
        _to_disk(working.path)
        _publish(working.path, target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{directory} could not be saved, and what was there is as it was ({error}): free space, or give "
                              "another folder") from error
    finally:
        if working is not None:
            _give_back(working.path, target)
            working.release()


def recover(directory: Path) -> None:
    """Puts back folders of `directory` that a killed save has taken along, and removes what it has left. Raises
    `CheckpointError`."""
    target = directory.resolve()
    try:
        for place in {target.parent, target}:
            if place.is_dir() and os.access(place, os.R_OK | os.W_OK | os.X_OK):
                for folder in abandoned(place, _prefix(target)):
                    _give_back(folder, target)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be looked into ({error.strerror}): give a folder that can be "
                              "written") from error


def _prefix(target: Path) -> str:
    return f".{target.name}.saving-"


def _place(target: Path) -> Path:
    """Where a working folder is made: beside the target, with which it can then change places; inside it where that is
    impossible, for a mount point, a parent that may not be written and the working directory of this process."""
    inside = target.exists() and (not os.access(target.parent, os.W_OK)
                                  or target.stat().st_dev != target.parent.stat().st_dev
                                  or _working_directory().is_relative_to(target))
    return target if inside else target.parent


def _working_directory() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:  # it was removed
        return Path("/")


def _publish(folder: Path, target: Path) -> None:
    if not target.exists():
        folder.rename(target)
        sync_folder(target.parent)
        return
    new = {path.name for path in folder.iterdir()}
    if in_the_way := sorted(name for name in new if (target / name).is_dir() and not (folder / name).is_dir()):
        raise IsADirectoryError(errno.EISDIR, "it is a folder, and a file is to be saved there", str(target / in_the_way[0]))
    weights = {_weights_name(name) for name in new if ".safetensors" in name}
    old = {path.name for path in target.iterdir()} - {folder.name}
    replaced = {name for name in old if name in new or _weights_name(name) in weights}
    if folder.parent == target or not _change_places(folder, target, old - replaced):
        _replace_files(folder, target, new, replaced - new)


def _weights_name(name: str) -> str:
    """What shards, the single file and the index of the same weights have in common."""
    return _SHARD.sub("", name).removesuffix(".index.json")


def _change_places(folder: Path, target: Path, kept: Collection[str]) -> bool:
    """Makes the folder the target in one step, with what is `kept` of the target; False, and nothing has changed, where the
    system cannot: on file systems without links or exchange, and for a folder that another file system is mounted on."""
    try:
        shutil.copymode(target, folder)
        for name in kept:
            if (target / name).is_symlink() or not (target / name).is_dir():
                os.link(target / name, folder / name, follow_symlinks=False)
        sync_folder(folder)
        for name in kept:
            if not (folder / name).is_symlink() and (target / name).is_dir():
                (folder / name).symlink_to(_way(folder, name))
                _exchange(folder / name, target / name)
        _exchange(folder, target)
    except OSError:
        _take_back(folder, target)
        return False
    sync_folder(target.parent)
    return True


def _way(folder: Path, name: str) -> Path:
    """From the target to what is in a working folder beside it."""
    return Path("..", folder.name, name)


def _exchange(one: Path, other: Path) -> None:
    """Two names change places in one step. Raises `OSError` where the system cannot."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    sys.audit("os.rename", one, other, -1, -1)  # as Python's own calls tell it
    if library.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(one), None, str(other))


def _take_back(folder: Path, target: Path) -> None:
    """Folders of the target that are in a working folder, where links lead to them, come home. Raises `OSError`."""
    for path in target.iterdir() if folder.parent != target and target.is_dir() else ():
        if path.is_symlink() and path.readlink() == _way(folder, path.name) and (folder / path.name).is_dir():
            _exchange(folder / path.name, path)


def _replace_files(folder: Path, target: Path, new: Collection[str], old: Collection[str]) -> None:
    """File by file, where that is all the system can do. The index goes first and comes last: a folder seen in between has
    none, and is refused, rather than shards of two checkpoints."""
    is_index = re.compile(r"\.index\.json$").search
    for name in (*new, *old):
        if is_index(name):
            (target / name).unlink(missing_ok=True)
    for name in sorted(new, key=lambda name: bool(is_index(name))):
        (folder / name).replace(target / name)
    for name in old:
        (target / name).unlink(missing_ok=True)
    sync_folder(target)


def _to_disk(folder: Path) -> None:
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    sync_folder(folder)


def _give_back(folder: Path, target: Path) -> None:
    """Removes what is left of a working folder, parts of a new checkpoint or the old one, but no folders."""
    with contextlib.suppress(OSError):
        _take_back(folder, target)
        for path in folder.iterdir():
            path.unlink()  # not folders
        folder.rmdir()
