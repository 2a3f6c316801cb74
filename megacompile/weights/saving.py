"""Saves a checkpoint so that its folder always holds a complete one: the new one is written in a working folder beside it, and
then the two folders are exchanged.

The user's own folders in it, such as checkpoints of a run, cannot be in both. Before the exchange each of them moves into the
working folder, by being exchanged with a link to its new location. So it can be reached by its own name at every moment, and is
a plain folder again after the exchange. A killed process leaves a working folder, `.NAME.saving-...`, and links into it. The
next save, or start of a run, puts folders back and removes the rest (`recover`). Until then a working folder may hold a folder
of the user's.
"""
from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from megacompile.errors import CheckpointError
from megacompile.system.files import WorkingFolder, abandoned, sync_folder

#: Small enough that one shard of additional host memory does not matter: the safetensors library may copy what it writes.
MAX_SHARD_SIZE = "5GB"
_SHARD = re.compile(r"-\d{5}-of-\d{5}")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def save_whole(save: Callable[..., Any], directory: str | os.PathLike[str], **options: Any) -> Any:
    """Runs `save(directory, **options)`, the `save_pretrained` of a transformers model, so that all files appear at once. Other
    files in the directory stay; shards of an older checkpoint are removed."""
    if not options.get("is_main_process", True):
        return save(directory, **options)
    if options.get("push_to_hub"):
        options.setdefault("repo_id", Path(directory).resolve().name)  # not the name of the working folder
    with replacing(Path(directory)) as folder:
        return save(str(folder), **{"max_shard_size": MAX_SHARD_SIZE, **options})


def forget_quantized_layout(model: nn.Module) -> None:
    """Makes `save_pretrained` write a model that transformers has dequantized in the layout of models that never were
    quantized. Otherwise transformers writes the layout that it has read: full weights under the names of codes, which it cannot
    load again."""
    for module in model.modules():
        steps = [step for conversion in getattr(module, "_weight_conversions", None) or ()
                 for step in getattr(conversion, "operations", ())]
        if getattr(module, "hf_quantizer", None) is None and any(hasattr(step, "hf_quantizer") for step in steps):
            module._weight_conversions = None  # type: ignore[assignment]  # transformers then looks up the model's own


@contextlib.contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """A new folder whose files are in `directory` once the block has ended: on disk, and all at once. If the block raises,
    `directory` is unchanged. Raises `CheckpointError` if the system refuses an operation."""
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
        raise _not_saved(directory, error) from error
    finally:
        if working is not None:
            _give_back(working.path, target)
            working.release()


def memory_in_a_file(directory: Path, size: int) -> Tensor:
    """uint8 [size] in a file without a name, on the file system that `directory` is saved on. Raises `CheckpointError`."""
    target = directory.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=_place(target)) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # on a full disk, the first write to a page would end the process
            return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
    except OSError as error:
        raise _not_saved(directory, error) from error


def _not_saved(directory: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{directory} could not be saved ({error}), and its earlier contents are unchanged: free space, or "
                           "give another folder")


def recover(directory: Path) -> None:
    """Puts back the folders of `directory` that a killed save had moved, and removes its other leftovers. Raises
    `CheckpointError`."""
    target = directory.resolve()
    try:
        for parent in {target.parent, target}:
            if parent.is_dir() and os.access(parent, os.R_OK | os.W_OK | os.X_OK):
                for folder in abandoned(parent, _prefix(target)):
                    _give_back(folder, target)
    except OSError as error:
        raise CheckpointError(f"what an interrupted save left of {directory} cannot be put back ({error.strerror}): make this "
                              "folder and its parent readable and writable, or give another folder") from error


def _prefix(target: Path) -> str:
    return f".{target.name}.saving-"


def _place(target: Path) -> Path:
    """The parent of the working folder: beside the target, so that the two can be exchanged. Inside the target if that is
    impossible: for a mount point, a parent without write permission, and the working directory of this process."""
    inside = target.exists() and (not os.access(target.parent, os.W_OK)
                                  or target.stat().st_dev != target.parent.stat().st_dev
                                  or _working_directory().is_relative_to(target))
    return target if inside else target.parent


def _working_directory() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:  # the working directory was removed
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
    """The part of the name that the shards, the single file and the index of the same weights share."""
    return _SHARD.sub("", name).removesuffix(".index.json")


def _change_places(folder: Path, target: Path, kept: Collection[str]) -> bool:
    """Exchanges the folder and the target in one step, and moves what is `kept` of the target into the new one. Returns False,
    and changes nothing, if the system cannot: on file systems without links or exchange, and for a folder that is a mount
    point."""
    try:
        shutil.copymode(target, folder)
        for name in kept:
            if (target / name).is_symlink() or not (target / name).is_dir():
                os.link(target / name, folder / name, follow_symlinks=False)
        sync_folder(folder)
        for name in kept:
            if not (folder / name).is_symlink() and (target / name).is_dir():
                (folder / name).symlink_to(_relative_link(folder, name))
                _exchange(folder / name, target / name)
        _exchange(folder, target)
    except OSError:
        _take_back(folder, target)
        return False
    sync_folder(target.parent)
    return True


def _relative_link(folder: Path, name: str) -> Path:
    """The relative path from the target to a file in the working folder beside it."""
    return Path("..", folder.name, name)


def _exchange(one: Path, other: Path) -> None:
    """Exchanges two names in one step. Raises `OSError` if the system cannot."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    sys.audit("os.rename", one, other, -1, -1)  # as Python's own calls report it
    if library.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(one), None, str(other))


def _take_back(folder: Path, target: Path) -> None:
    """Moves folders of the target back from a working folder that links in the target lead to. Raises `OSError`."""
    for path in target.iterdir() if folder.parent != target and target.is_dir() else ():
        if path.is_symlink() and path.readlink() == _relative_link(folder, path.name) and (folder / path.name).is_dir():
            _exchange(folder / path.name, path)


def _replace_files(folder: Path, target: Path, new: Collection[str], old: Collection[str]) -> None:
    """Replaces file by file, for systems that cannot exchange folders. The index is removed first and added last. A folder that
    is read in between has no index and is refused, instead of being read as shards of two checkpoints."""
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
    """Removes the files of a working folder, parts of a new checkpoint or the old one, and then the folder; keeps folders in
    it."""
    with contextlib.suppress(OSError):
        _take_back(folder, target)
        for path in folder.iterdir():
            path.unlink()  # not folders
        folder.rmdir()
