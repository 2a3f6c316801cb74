"""Folders of checkpoints: lists them, creates new ones atomically, and removes old ones.

    runs/
      000001-step-500/       number of the save, number of steps; the number orders saves even after resuming at an earlier step
      000002-step-1000/
      .incomplete-x3k9q/     being written or removed; locked by the process that does it

A checkpoint is written into a folder with a temporary name, which is then renamed. So every folder with the name of a
checkpoint was complete once. Folders left behind by dead processes are removed when the next checkpoint is written.
"""
from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from megacompile.checkpoint.manifest import Manifest
from megacompile.errors import CheckpointError
from megacompile.system.files import WorkingFolder, abandoned, sync_folder, unused

_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_INCOMPLETE = ".incomplete-"


def named(directory: Path) -> list[Path]:
    """The folders with the name of a checkpoint, oldest save first. Raises `CheckpointError` if `directory` cannot be read."""
    try:
        if not directory.is_dir():
            return []
        return sorted((path for path in directory.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()), key=_number)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read ({error.strerror}): give a folder of checkpoints that can be "
                              "read") from error


def _number(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None, f"{path} does not have the name of a checkpoint"
    return int(match[1])


def complete(directory: Path) -> list[Path]:
    """The checkpoints with a complete manifest, oldest save first."""
    return [path for path in named(directory) if _has_manifest(path)]


def _has_manifest(path: Path) -> bool:
    try:
        Manifest.read(path)
    except CheckpointError:
        return False
    return True


def latest_checkpoint(directory: str | Path) -> Path | None:
    """The newest complete checkpoint in a folder of checkpoints, or None. Raises `CheckpointError` if the folder cannot be
    read."""
    return _newest_complete(named(Path(directory)))


def checkpoint_before(checkpoint: Path) -> Path | None:
    """The newest complete checkpoint that was saved before this one in the same folder, or None. Raises `CheckpointError` if
    the folder cannot be read."""
    saved = named(checkpoint.parent)
    return _newest_complete(saved[:saved.index(checkpoint)]) if checkpoint in saved else None


def _newest_complete(saved: Sequence[Path]) -> Path | None:
    return next((path for path in reversed(saved) if _has_manifest(path)), None)


class Incomplete(WorkingFolder):
    """A folder in which a checkpoint is being written, until it is published or discarded."""

    def __init__(self, directory: Path) -> None:
        """Raises `OSError`."""
        directory.mkdir(parents=True, exist_ok=True)
        sweep(directory)
        super().__init__(directory, _INCOMPLETE)

    def publish(self, step: int, keep: int) -> Path:
        """Renames the folder to its final name, and removes all except the last `keep` complete checkpoints. Raises
        `OSError`."""
        directory = self.path.parent
        sync_folder(self.path)
        number = max(map(_number, named(directory)), default=0)
        while True:
            number += 1
            target = directory / f"{number:06d}-step-{step}"
            try:
                self.path.rename(target)
                break
            except OSError as error:  # another process has taken this number
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        sync_folder(directory)
        self.release()
        for old in complete(directory)[:-keep]:
            _remove(old)
        return target

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)  # files that remain are removed when the next checkpoint is written
        self.release()


def sweep(directory: Path) -> None:
    """Removes incomplete checkpoints of dead processes."""
    for path in abandoned(directory, _INCOMPLETE):
        shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    """Removes a checkpoint. Renames it first, so that a partly removed checkpoint is not mistaken for a complete one."""
    doomed = unused(path.parent, _INCOMPLETE)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
