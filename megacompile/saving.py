"""Saving a checkpoint so that its folder always has a whole one: the new one is written beside, then both change places.

A process that is killed while it writes leaves a folder `.NAME.saving-...` beside, which can be deleted.
"""
from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from megacompile.errors import CheckpointError

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
    target = directory.resolve()
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{directory} is a file: give a folder to save in")
    folder = _working_folder(target)
    try:
        folder.mkdir(parents=True)
        yield folder
        _to_disk(folder)
        _publish(folder, target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{directory} could not be saved, and what was there is as it was ({error}): free space, or give "
                              "another folder") from error
    finally:
        _discard(folder)


def _working_folder(target: Path) -> Path:
    """Beside the target, with which it can then change places; inside it where that is impossible: a mount point, a parent that
    may not be written, the working directory of this process."""
    inside = target.exists() and (not os.access(target.parent, os.W_OK)
                                  or target.stat().st_dev != target.parent.stat().st_dev
                                  or _working_directory().is_relative_to(target))
    return (target if inside else target.parent) / f".{target.name}.saving-{secrets.token_hex(4)}"


def _working_directory() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:  # it was removed
        return Path("/")


def _publish(folder: Path, target: Path) -> None:
    if not target.exists():
        folder.rename(target)
        _sync(target.parent)
        return
    new = {path.name for path in folder.iterdir()}
    weights = {_weights_name(name) for name in new if ".safetensors" in name}
    old = {path.name for path in target.iterdir()} - {folder.name}
    replaced = {name for name in old if name in new or _weights_name(name) in weights}
    if folder.parent == target or not _change_places(folder, target, old - replaced):
        _replace_files(folder, target, new, replaced - new)


def _weights_name(name: str) -> str:
    """What shards, the single file and the index of the same weights have in common."""
    return _SHARD.sub("", name).removesuffix(".index.json")


def _change_places(folder: Path, target: Path, kept: Collection[str]) -> bool:
    """Makes the folder the target in one step, with the files of the target that are `kept`; False, and nothing has changed,
    where the system cannot. Folders in the target follow in a second step: they have no second name."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "renameat2"):
        return False
    try:
        shutil.copymode(target, folder)
        for name in kept:
            if (target / name).is_symlink() or not (target / name).is_dir():
                os.link(target / name, folder / name, follow_symlinks=False)
    except OSError:  # a file system without hard links
        return False
    _sync(folder)
    if library.renameat2(_AT_FDCWD, os.fsencode(folder), _AT_FDCWD, os.fsencode(target), _RENAME_EXCHANGE) != 0:
        return False
    for name in kept:
        if not (target / name).is_symlink() and not (target / name).exists():
            try:
                (folder / name).rename(target / name)
            except OSError as error:
                raise CheckpointError(f"{target} was saved, but its folder {name} could not follow and is in {folder} now "
                                      f"({error.strerror}): move it back") from error
    _sync(target.parent)
    return True


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
    _sync(target)


def _to_disk(folder: Path) -> None:
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _discard(folder: Path) -> None:
    """Removes what is left of a working folder: parts of a new checkpoint, or the old one. Never folders in it, which are the
    user's and could not be moved."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
