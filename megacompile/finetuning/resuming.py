"""Resuming a run of `megacompile train`: from which checkpoint, and with which settings."""
from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

import megacompile
from megacompile import schema
from megacompile.checkpoint import latest_checkpoint
from megacompile.checkpoint.loading import read_extra
from megacompile.corpus import PretrainedTokenizer, Tokenizer
from megacompile.errors import ArgumentError, CheckpointError
from megacompile.finetuning.saves import CHECKPOINTS
from megacompile.finetuning.settings import Settings

#: Settings that must not change when a run is resumed: they determine the order of the data, or are restored from a checkpoint.
FIXED = ("batch", "length", "lr", "beta1", "beta2", "eps", "weight_decay")
#: The optimizer of runs of versions that had only one, and did not name it in their checkpoints.
_FIRST_OPTIMIZER = "AdamW, state_dtype float32"
#: Where a chat template prints the time at which it is rendered, such as today's date.
_CLOCK = re.compile(r"""strftime_now\(\s*(?P<quote>['"])(?P<format>[^'"]*)(?P=quote)\s*\)""")
#: The name of that time among the settings that must not change.
TEMPLATE_TIME = "template_time"
_PROGRESS = schema.record({"done": schema.whole(0, 2**53), "fixed": schema.table(schema.text(), schema.anything)})


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


def fixed_settings(start: Path) -> Mapping[str, Any]:
    """The settings of the run that saved a checkpoint, as far as they must not change. Raises `CheckpointError` if no run saved
    it."""
    return dict(_progress(start, read_extra(start))["fixed"])


@contextmanager
def template_time(tokenizer: Tokenizer, then: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """A context in which the tokenizer's chat template prints one time: that of an earlier run with the settings `then`, or
    now. So a run that goes on another day has the same rows. Gives the time as a setting that must not change, or nothing if
    the template does not read the clock. Raises `CheckpointError` if the earlier run's time is none."""
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


def resume(start: Path, fixed: Mapping[str, Any], model: Any, optimizer: Any, schedule: Any) -> int:
    """Loads a checkpoint and returns the number of steps that were done. Raises `CheckpointError` if it is from another run."""
    then = _progress(start, megacompile.load_checkpoint(start, model, optimizer, scheduler=schedule))
    check_same_run(start, then["fixed"], fixed)
    return int(then["done"])


def _progress(start: Path, extra: Any) -> dict[str, Any]:
    """The run's data in a checkpoint: `done`, the number of steps; `fixed`, the settings that must not change. Raises
    `CheckpointError` if the checkpoint has no such data."""
    try:
        _PROGRESS(extra, "extra")
    except schema.SchemaError as error:
        raise CheckpointError(f"{start} was not saved by megacompile train ({error}): give a checkpoint of a run") from error
    return dict(extra)
