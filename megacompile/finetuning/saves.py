"""Checkpoints of a run, written every few steps while training continues, and at its end."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from megacompile.checkpoint import CheckpointWriter
from megacompile.errors import CheckpointError
from megacompile.finetuning.settings import Settings

CHECKPOINTS = "checkpoints"


class Saves:
    """Saves into OUTPUT/checkpoints; does nothing without an output folder. State: the last step that was saved.

    If a save fails during training, the reason is printed and training continues; if the last save fails, that is raised.
    `fixed`: the settings that must be the same when the run is resumed."""

    def __init__(self, settings: Settings, model: Any, optimizer: Any, schedule: Any, fixed: Mapping[str, Any], done: int,
                 say: Callable[[str], None]) -> None:
        self._interval, self._fixed, self._saved, self._say = settings.save_interval, dict(fixed), done, say
        self._writer = None if settings.output is None else CheckpointWriter(
            settings.output / CHECKPOINTS, model, optimizer, scheduler=schedule, keep=settings.keep)

    def after(self, step: int) -> None:
        if self._writer is not None and step % self._interval == 0:
            try:
                self._save(step)
            except CheckpointError as error:
                self._say(str(error))

    def last(self, step: int) -> None:
        """Saves the last step and returns when it is on disk. Raises `CheckpointError`."""
        if self._writer is None:
            return
        try:
            self._writer.wait()
        except CheckpointError as error:
            self._say(str(error))
            self._saved = -1
        if self._saved != step:
            self._save(step)
            self._writer.wait()

    def _save(self, step: int) -> None:
        assert self._writer is not None
        self._writer.save(extra={"done": step, "fixed": self._fixed})
        self._saved = step

    def __enter__(self) -> Saves:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._writer is not None:
            self._writer.close()
