"""Folders of checkpoints: which are there, how a new one comes to be, and how old ones go.

    runs/
      000001-step-500/       number of the save, steps trained: a save after going back to an earlier step is still the newest
      000002-step-1000/
      .incomplete-x3k9q/     one that is being written, or being removed; locked by whoever does it

A checkpoint is made whole in a folder with another name and then renamed, so that whatever has a checkpoint's name was complete
once. What a dead process has left is removed when the next one is written.
"""
from __future__ import annotations

import errno
import re
import shutil
from pathlib import Path

from megacompile.checkpoint.manifest import Manifest
from megacompile.errors import CheckpointError
from megacompile.system.atomic_files import sync_folder
from megacompile.system.working_folders import WorkingFolder, abandoned, unused

_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_INCOMPLETE = ".incomplete-"


def named(directory: Path) -> list[Path]:
    """The folders that have a checkpoint's name, oldest save first. Raises `CheckpointError` where that cannot be seen."""
    try:
        if not directory.is_dir():
            return []
        return sorted((path for path in directory.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()), key=_number)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be looked into ({error.strerror}): give a folder that can be "
                              "read") from error


def _number(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None, f"{path} has no checkpoint's name"
    return int(match[1])


def complete(directory: Path) -> list[Path]:
    """Those with a whole manifest, oldest save first."""
    return [path for path in named(directory) if _has_manifest(path)]


def _has_manifest(path: Path) -> bool:
    try:
        Manifest.read(path)
    except CheckpointError:
        return False
    return True


def latest_checkpoint(directory: str | Path) -> Path | None:
    """The newest complete checkpoint in a folder of checkpoints; None if there is none. Raises `CheckpointError` for a folder
    that cannot be looked into."""
    return next((path for path in reversed(named(Path(directory))) if _has_manifest(path)), None)


class Incomplete(WorkingFolder):
    """A folder in which a checkpoint is being written, until it is published or discarded."""

    def __init__(self, directory: Path) -> None:
        """Raises `OSError`."""
        directory.mkdir(parents=True, exist_ok=True)
        sweep(directory)
        super().__init__(directory, _INCOMPLETE)

    def publish(self, step: int, keep: int) -> Path:
        """Gives the folder its name, and removes all but the last `keep` complete ones. Raises `OSError`."""
        directory = self.path.parent
        sync_folder(self.path)
        number = max(map(_number, named(directory)), default=0)
        while True:
            number += 1
            target = directory / f"{number:06d}-step-{step}"
            try:
                self.path.rename(target)
                break
            except OSError as error:  # another process was first
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        sync_folder(directory)
        self.release()
        for old in complete(directory)[:-keep]:
            _remove(old)
        return target

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)  # what is left is swept when the next one is written
        self.release()


def sweep(directory: Path) -> None:
    """Removes what was left by writers that are dead."""
    for path in abandoned(directory, _INCOMPLETE):
        shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    """Under another name first: half of a checkpoint must not look like one."""
    doomed = unused(path.parent, _INCOMPLETE)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
