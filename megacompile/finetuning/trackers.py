"""Where a run's log goes beside its folder: the trackers of Accelerate."""
from __future__ import annotations

import enum
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megacompile.errors import ArgumentError, MegacompileError

#: Of a run's project or experiment, unless the tracker's own variable of the environment says otherwise.
PROJECT = "megacompile"


class Tracker(enum.StrEnum):
    """A service that draws curves; its package has its name."""

    NONE = "none"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"


def check_trackers(asked: Sequence[Tracker], folder: Path | None) -> None:
    """Raises `ArgumentError` for what does not go together, `MegacompileError` for what is not installed."""
    if Tracker.NONE in asked and len(asked) > 1:
        raise ArgumentError(f"--report-to none excludes {asked[0] if asked[0] != Tracker.NONE else asked[1]}: give one of them")
    if Tracker.TENSORBOARD in asked and folder is None:
        raise ArgumentError("--report-to tensorboard needs --output, the folder of the run")
    for each in asked:
        for package in () if each is Tracker.NONE else (each.value, "accelerate"):
            if importlib.util.find_spec(package) is None:
                raise MegacompileError(f"--report-to {each} needs {package}, which is not installed: pip install {package}")


class Trackers:
    """Those that were asked for. State: which still take values: one that fails is said once, and ends no training."""

    def __init__(self, started: Mapping[str, Any], say: Callable[[str], None] = print) -> None:
        self._started, self._say = dict(started), say

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, tracker in list(self._started.items()):
            try:
                tracker.log(dict(values), step=step)
            except Exception as error:  # of the network, of a disk, of a server: there are many
                self._say(f"{name} gets no more from step {step} on ({type(error).__name__}: {error}): training goes on")
                del self._started[name]

    def finish(self) -> None:
        for name, tracker in self._started.items():
            try:
                tracker.finish()
            except Exception as error:
                self._say(f"{name} did not end well ({type(error).__name__}: {error})")


@contextmanager
def started(asked: Sequence[Tracker], folder: Path | None, done: int, settings: Mapping[str, Any],
            say: Callable[[str], None]) -> Iterator[Trackers]:
    """The trackers, told of the run's settings. `done`: steps that were trained before. Raises `MegacompileError` for one that
    does not start, since nobody is logged in, for example."""
    running: dict[str, Any] = {}
    try:
        for each in asked:
            if each is not Tracker.NONE:
                running[each.value] = _start(each, folder, done, settings)
        yield Trackers(running, say)
    finally:
        Trackers(running, say).finish()


def _start(which: Tracker, folder: Path | None, done: int, settings: Mapping[str, Any]) -> Any:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    name = folder.name if folder is not None else None
    try:
        match which:
            case Tracker.TENSORBOARD:
                assert folder is not None, "settings were not checked"
                tracker = LOGGER_TYPE_TO_CLASS["tensorboard"](Tracker.TENSORBOARD.value, folder, purge_step=done + 1)
            case Tracker.WANDB:
                tracker = LOGGER_TYPE_TO_CLASS["wandb"](os.environ.get("WANDB_PROJECT", PROJECT), name=name)
            case _:
                tracker = LOGGER_TYPE_TO_CLASS["mlflow"](PROJECT, run_name=name)
        tracker.start()
        if which is not Tracker.TENSORBOARD:  # which would add a folder for them
            tracker.store_init_configuration(dict(settings))
        return tracker
    except Exception as error:  # whatever its package raises
        raise MegacompileError(f"--report-to {which} cannot start: check its login and its server, or leave it out\n"
                               f"{type(error).__name__}: {error}") from error
