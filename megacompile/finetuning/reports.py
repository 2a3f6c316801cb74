"""What is written of a run: a line of JSON for each step, the same to trackers, and at the end the curve."""
from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from megacompile.errors import MegacompileError
from megacompile.finetuning.progress import Entry
from megacompile.finetuning.trackers import Trackers
from megacompile.system.atomic_files import replace_file
from megacompile.system.regular_files import read_regular

LOG, CURVE = "log.jsonl", "loss.svg"


class Reports:
    """Of a run in `folder`, or nowhere. State: the open files. Raises `MegacompileError` where nothing can be written; a log
    that cannot be written any more is said, and ends no training.

    `done`: steps that were trained before; what an interrupted run has logged of later ones goes, since they come again."""

    def __init__(self, folder: Path | None, done: int, trackers: Trackers | None = None,
                 say: Callable[[str], None] = print) -> None:
        self._log, self._trackers, self._say = None, trackers or Trackers({}), say
        if folder is None:
            return
        try:
            replace_file(folder / LOG, _kept(folder / LOG, done) if done else [])
            self._log = (folder / LOG).open("a", encoding="utf-8", buffering=1)  # by lines: a kill loses none
        except OSError as error:
            raise MegacompileError(f"{folder / LOG} cannot be written ({error.strerror}): give an --output that can") from error

    def step(self, entry: Entry) -> None:
        step = entry.step
        known = {"grad_norm": entry.grad_norm, "seconds_left": entry.seconds_left}
        self._write(step.number, epoch=entry.epoch, loss=step.loss, mean_loss=entry.mean_loss,
                    **{name: value for name, value in known.items() if value is not None}, lr=step.lr,
                    tokens_per_second=step.rate, padding_share=step.padding, tflops=step.tflops,
                    device_bytes=step.device_bytes, host_bytes=step.host_bytes, seconds=step.seconds)

    def evaluation(self, number: int, loss: float) -> None:
        self._write(number, eval_loss=loss)

    def _write(self, number: int, **values: float) -> None:
        if self._log is not None:
            try:
                self._log.write(json.dumps({"step": number, **values, "time": time.time()}) + "\n")
            except OSError as error:
                self._say(f"{self._log.name} ends at step {number} ({error.strerror}): training goes on")
                self._log = None
        self._trackers.log(number, values)

    def __enter__(self) -> Reports:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._log is not None:
            self._log.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The entries of a log; lines that are none, such as one that a kill has cut off, are left out. Raises `OSError`."""
    return [entry for _, entry in _lines(path) if entry is not None]


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Each line of a log, without its end, and its entry. Raises `OSError`."""
    for line in read_regular(path).split(b"\n") if path.exists() else []:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        yield line, found if isinstance(found, dict) and type(found.get("step")) is int else None


def _kept(path: Path, done: int) -> list[bytes]:
    """The lines that a run goes on with after `done` steps: all but entries of later steps and what follows the last end of a
    line. What is no entry of ours is somebody's note."""
    lines = list(_lines(path))
    if lines and lines[-1][1] is None:
        lines.pop()
    return [line + b"\n" for line, entry in lines if entry is None or entry["step"] <= done]


def draw_curve(folder: Path) -> str | None:
    """Draws the losses that a run's log has. Why it could not, or None."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "for want of matplotlib: pip install matplotlib"
    try:
        entries = read_log(folder / LOG)
    except OSError as error:
        return f"since {folder / LOG} cannot be read: {error.strerror}"
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for key, name, style in (("loss", "training", "-"), ("eval_loss", "evaluation", "o-")):
        points = [(entry["step"], entry[key]) for entry in entries if key in entry]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=name, linewidth=1, markersize=4)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a token")
    if entries:
        axes.legend()
    try:
        figure.savefig(folder / CURVE)
    except OSError as error:
        return f"since {folder / CURVE} cannot be written: {error.strerror}"
    return None
