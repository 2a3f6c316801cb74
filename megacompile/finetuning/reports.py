"""Writes the log of a run (a JSON line for each step), sends the same values to trackers, and draws the loss curve."""
from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from megacompile.errors import MegacompileError
from megacompile.finetuning.run_progress import Entry
from megacompile.finetuning.trackers import Trackers
from megacompile.system.files import read_regular, replace_file

LOG, CURVE = "log.jsonl", "loss.svg"


class Reports:
    """The log of a run in `folder` (None: no file). State: the open file. Raises `MegacompileError` if the log cannot be
    opened. If it cannot be written later, the reason is printed and training continues.

    `done`: number of steps trained before. Entries of later steps, which an interrupted run has logged, are removed, since
    these steps run again."""

    def __init__(self, folder: Path | None, done: int, trackers: Trackers | None = None,
                 say: Callable[[str], None] = print) -> None:
        self._log, self._trackers, self._say = None, trackers or Trackers({}), say
        if folder is None:
            return
        try:
            replace_file(folder / LOG, _kept(folder / LOG, done) if done else [])
            self._log = (folder / LOG).open("a", encoding="utf-8", buffering=1)  # line by line: a killed process loses none
        except OSError as error:
            raise MegacompileError(f"{folder / LOG} cannot be written ({error.strerror}): give a writable --output") from error

    def step(self, entry: Entry) -> None:
        step = entry.step
        known = {"grad_norm": entry.grad_norm, "seconds_left": entry.seconds_left,
                 "disk_bytes_written": step.disk_bytes_written or None, **entry.more}
        self._write(step.number, epoch=entry.epoch, loss=step.loss, mean_loss=entry.mean_loss,
                    **{name: value for name, value in known.items() if value is not None}, lr=step.lr,
                    tokens_per_second=step.rate, padding_share=step.padding, tflops=step.tflops,
                    device_bytes=step.device_bytes, host_bytes=step.host_bytes, process_bytes=step.process_bytes,
                    seconds=step.seconds)

    def evaluation(self, number: int, **values: float) -> None:
        self._write(number, **values)

    def _write(self, number: int, **values: float) -> None:
        if self._log is not None:
            try:
                self._log.write(json.dumps({"step": number, **values, "time": time.time()}) + "\n")
            except OSError as error:
                self._say(f"{self._log.name} cannot be written after step {number} ({error.strerror}): training continues "
                          "without it")
                self._log = None
        self._trackers.log(number, values)

    def __enter__(self) -> Reports:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._log is not None:
            self._log.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The entries of a log. Skips other lines, such as one that was cut off when the process was killed. Raises `OSError`."""
    return [entry for _, entry in _lines(path) if entry is not None]


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Each line of a log without its newline, and its entry (None if it is not one). Raises `OSError`."""
    for line in read_regular(path).split(b"\n") if path.exists() else []:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        yield line, found if isinstance(found, dict) and type(found.get("step")) is int else None


def _kept(path: Path, done: int) -> list[bytes]:
    """The lines of a log to keep when a run is resumed after `done` steps: all except entries of later steps and an incomplete
    last line. Lines that are not entries are kept, since they may be the user's notes."""
    lines = list(_lines(path))
    if lines and lines[-1][1] is None:
        lines.pop()
    return [line + b"\n" for line, entry in lines if entry is None or entry["step"] <= done]


def draw_curve(folder: Path) -> str | None:
    """Draws the losses in a run's log. Returns the reason if that fails, otherwise None."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "matplotlib is not installed (pip install matplotlib)"
    try:
        entries = read_log(folder / LOG)
    except OSError as error:
        return f"{folder / LOG} cannot be read ({error.strerror})"
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for key, name, style in (("loss", "training", "-"), ("eval_loss", "evaluation", "o-")):
        points = [(entry["step"], entry[key]) for entry in entries if key in entry]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=name, linewidth=1, markersize=4)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    if entries:
        axes.legend()
    try:
        figure.savefig(folder / CURVE)
    except OSError as error:
        return f"{folder / CURVE} cannot be written ({error.strerror})"
    return None
