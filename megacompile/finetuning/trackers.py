"""Sends the log of a run to experiment trackers, by means of Accelerate."""
from __future__ import annotations

import enum
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megacompile.errors import ArgumentError, MegacompileError

#: Name of the project or experiment, unless the tracker's own environment variable sets another.
PROJECT = "megacompile"


class Tracker(enum.StrEnum):
    """An experiment tracker. Its package has the same name."""

    NONE = "none"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"


def check_trackers(asked: Sequence[Tracker], folder: Path | None) -> None:
    """Raises `ArgumentError` for settings that contradict each other, `MegacompileError` for missing packages."""
    if Tracker.NONE in asked and len(asked) > 1:
        raise ArgumentError(f"--report-to none excludes {asked[0] if asked[0] != Tracker.NONE else asked[1]}: give one of them")
    if Tracker.TENSORBOARD in asked and folder is None:
        raise ArgumentError("--report-to tensorboard needs --output, the folder of the run")
    for each in asked:
        for package in () if each is Tracker.NONE else (each.value, "accelerate"):
            if importlib.util.find_spec(package) is None:
                raise MegacompileError(f"--report-to {each} needs {package}, which is not installed: pip install {package}")


class Trackers:
    """The trackers of a run. State: those that still accept values. If one fails, this is printed once, it gets no more values,
    and training continues."""

    def __init__(self, started: Mapping[str, Any], say: Callable[[str], None] = print) -> None:
        self._started, self._say = dict(started), say

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, tracker in list(self._started.items()):
            try:
                tracker.log(dict(values), step=step)
            except Exception as error:  # the network, a disk or a server: there are many types
                self._say(f"{name} failed at step {step} ({type(error).__name__}: {error}): training continues without it")
                del self._started[name]

    def finish(self) -> None:
        for name, tracker in self._started.items():
            try:
                tracker.finish()
            except Exception as error:
                self._say(f"{name} failed while finishing ({type(error).__name__}: {error})")


@contextmanager
def started(asked: Sequence[Tracker], folder: Path | None, done: int, settings: Mapping[str, Any],
            say: Callable[[str], None]) -> Iterator[Trackers]:
    """Starts the trackers and gives them the run's settings. `done`: number of steps trained before. Raises `MegacompileError`
    if one cannot start, for example because the user is not logged in."""
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
        if which is not Tracker.TENSORBOARD:  # it would create another folder for them
            tracker.store_init_configuration(dict(settings))
        return tracker
    except Exception as error:  # its package may raise anything
        raise MegacompileError(f"--report-to {which} cannot start: check its login and its server, or leave it out\n"
                               f"{type(error).__name__}: {error}") from error
