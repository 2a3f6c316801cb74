"""Checkpoints of a run, written every few steps while training continues, and at its end."""
from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console

import megacompile
from megacompile import schema
from megacompile.checkpoint import CheckpointWriter, latest_checkpoint
from megacompile.checkpoint.loading import read_extra
from megacompile.corpus import PretrainedTokenizer, Tokenizer
from megacompile.errors import ArgumentError, CheckpointError, MegacompileError
from megacompile.finetuning.settings import Settings
from megacompile.system.linux import fcntl

CHECKPOINTS = "checkpoints"


class Saves:
    """Saves into OUTPUT/checkpoints; does nothing without an output folder. State: what it saves, set by `begin`, and the last
    step that was saved.

    If a save fails during training, the reason is printed and training continues; if the last save fails, that is raised.
    `fixed`: the settings that must be the same when the run is resumed."""

    def __init__(self, settings: Settings, fixed: Mapping[str, Any], done: int, say: Callable[[str], None]) -> None:
        self._settings, self._fixed, self._saved, self._say = settings, dict(fixed), done, say
        self._writer: CheckpointWriter | None = None

    def begin(self, model: Any, optimizer: Any, schedule: Any) -> None:
        """Gives the model that is trained, its optimizer and its schedule."""
        if self._settings.output is not None:
            self._writer = CheckpointWriter(self._settings.output / CHECKPOINTS, model, optimizer, scheduler=schedule,
                                            keep=self._settings.keep)

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Saves this step while training continues. `state`: Trainer's own."""
        if self._writer is not None:
            try:
                self._save(step, state)
            except CheckpointError as error:
                self._say(str(error))

    def last(self, step: int, state: Mapping[str, Any]) -> None:
        """Saves the last step and returns when it is on disk. Raises `CheckpointError`."""
        if self._writer is None:
            return
        try:
            self._writer.wait()
        except CheckpointError as error:
            self._say(str(error))
            self._saved = -1
        if self._saved != step:
            self._save(step, state)
            self._writer.wait()

    def _save(self, step: int, state: Mapping[str, Any]) -> None:
        assert self._writer is not None
        self._writer.save(extra={"done": step, "fixed": self._fixed, "state": json.dumps(state)})
        self._saved = step

    def __enter__(self) -> Saves:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._writer is not None:
            self._writer.close()


# -------------------- Creates and locks the folder of a run
#
# Only one process at a time may use it: two would corrupt each other's log and remove each other's checkpoints.
def check_writable(folder: Path) -> None:
    """Raises `MegacompileError` if the folder cannot be created or written to. Leaves nothing behind."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise MegacompileError(f"nothing can be saved in {folder} ({error.strerror}): give a directory that can be "
                               "written") from error


@contextlib.contextmanager
def created(folder: Path) -> Iterator[None]:
    """Creates a folder with its parents. If the block raises, removes those that were created and are still empty.

    Raises `MegacompileError` if the folder cannot be written to."""
    check_writable(folder)
    new = [each for each in (folder, *folder.absolute().parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for each in new:
            with contextlib.suppress(OSError):
                each.rmdir()
        raise


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks an existing folder until the context or the process ends. Raises `ArgumentError` if another process has locked it.
    On a file system without locks, does nothing."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArgumentError(f"another run is writing to {folder}: wait for its end, or give another --output") from None
        except OSError:  # the file system has no locks
            pass
        yield
    finally:
        os.close(descriptor)


# -------------------- Resuming a run of `megacompile train`: from which checkpoint, and with which settings
#: Settings that must not change when a run is resumed: they determine the order of the data, or are restored from a checkpoint.
FIXED = ("batch", "length", "lr", "beta1", "beta2", "eps", "weight_decay")
#: The optimizer of runs of versions that had only one, and did not name it in their checkpoints.
_FIRST_OPTIMIZER = "AdamW, state_dtype float32"
#: Where a chat template prints the time at which it is rendered, such as today's date.
_CLOCK = re.compile(r"""strftime_now\(\s*(?P<quote>['"])(?P<format>[^'"]*)(?P=quote)\s*\)""")
#: The name of that time among the settings that must not change.
TEMPLATE_TIME = "template_time"
_PROGRESS = schema.record({"done": schema.whole(0, 2**53), "fixed": schema.table(schema.text(), schema.anything)},
                          {"state": schema.text()})


def start_of(settings: Settings, console: Console) -> Path | None:
    """The checkpoint to resume from, or None. Raises `ArgumentError` if the given one does not exist, or if the output folder
    has checkpoints but --resume was not given."""
    folder = settings.output / CHECKPOINTS if settings.output else None
    if settings.resume == "latest":
        assert folder is not None, "settings were not checked"
        latest = latest_checkpoint(folder)
        if latest is None:
            console.print(f"{folder} has no checkpoint yet: starting a new run")
        return latest
    if settings.resume is not None:
        given = Path(settings.resume)
        if not given.is_dir():
            raise ArgumentError(f"cannot resume: folder {given} does not exist: give a checkpoint, a folder of checkpoints, or "
                                "latest")
        return given / CHECKPOINTS if (given / CHECKPOINTS).is_dir() else given
    if folder is not None and latest_checkpoint(folder) is not None:
        raise ArgumentError(f"{settings.output} has checkpoints of an earlier run: give --resume latest to continue it, or "
                            "another --output")
    return None


def progress_of(start: Path) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """(number of steps done, the settings that must not change, Trainer's state) of a checkpoint's run. Raises
    `CheckpointError` if no run saved it."""
    found = _progress(start, read_extra(start))
    try:
        state = json.loads(found.get("state", "{}"))
        assert isinstance(state, dict)
    except (ValueError, AssertionError) as error:
        raise CheckpointError(f"the state in {start} cannot be read: give another checkpoint") from error
    return int(found["done"]), dict(found["fixed"]), {**state, "global_step": int(found["done"])}


@contextmanager
def template_time(tokenizer: Tokenizer, then: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """A context in which the tokenizer's chat template prints one time: that of an earlier run with the settings `then`, or
    now. So a run that continues on another day has the same rows. Gives the time as a setting that must not change, or nothing
    if the template does not read the clock. Raises `CheckpointError` if the earlier run's time is not a time."""
    pretrained = tokenizer.pretrained if isinstance(tokenizer, PretrainedTokenizer) else None
    before = getattr(pretrained, "chat_template", None)
    named = before if isinstance(before, dict) else {"": before or ""}
    if pretrained is None or not any(map(_CLOCK.search, named.values())):
        yield {}
        return
    try:
        time = datetime.fromisoformat(str(then.get(TEMPLATE_TIME, datetime.now().isoformat(timespec="seconds"))))
    except ValueError as error:
        raise CheckpointError(f"the checkpoint has {TEMPLATE_TIME} {then[TEMPLATE_TIME]!r}, which is not a time: give another "
                              "checkpoint") from error
    fixed = {name: _CLOCK.sub(lambda found: json.dumps(time.strftime(found["format"]), ensure_ascii=False), text)
             for name, text in named.items()}
    pretrained.chat_template = fixed if isinstance(before, dict) else fixed[""]
    try:
        yield {TEMPLATE_TIME: time.isoformat()}
    finally:
        pretrained.chat_template = before


def check_same_run(start: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` if settings that must not change have changed."""
    then = {"optim": _FIRST_OPTIMIZER, **then}
    if changed := [f"{name} (was {then.get(name)}, now {value})" for name, value in now.items() if then.get(name) != value]:
        raise CheckpointError(f"{start} is from a run with other settings: {', '.join(changed)}; use its settings, or start a "
                              "new run from the model that it saved")


def resume(start: Path, fixed: Mapping[str, Any], model: Any, optimizer: Any, schedule: Any) -> None:
    """Loads a checkpoint. Raises `CheckpointError` if it is from another run."""
    check_same_run(start, _progress(start, megacompile.load_checkpoint(start, model, optimizer, scheduler=schedule))["fixed"],
                   fixed)


def _progress(start: Path, extra: Any) -> dict[str, Any]:
    """The run's data in a checkpoint: `done`, the number of steps; `fixed`, the settings that must not change. Raises
    `CheckpointError` if the checkpoint has no such data."""
    try:
        _PROGRESS(extra, "extra")
    except schema.SchemaError as error:
        raise CheckpointError(f"{start} was not saved by megacompile train ({error}): give a checkpoint of a run") from error
    return dict(extra)
