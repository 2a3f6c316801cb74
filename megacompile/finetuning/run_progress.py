"""Progress of a run: derives running values from each step and shows them."""
from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megacompile.sizes import format_bytes
from megacompile.system.progress import shown_by
from megacompile.training import Step

#: Number of steps for the running mean of the loss and for the estimate of the remaining time.
WINDOW = 100


@dataclass(frozen=True)
class Entry:
    """A step and its place in the run. `epoch`: passes over the data so far; `mean_loss`: mean over the last `WINDOW` steps;
    `seconds_left`: None until two steps are done, which the estimate needs; `more`: other values of the task's trainer."""

    step: Step
    epoch: float
    mean_loss: float
    seconds_left: float | None
    grad_norm: float | None = None
    more: Mapping[str, float] = field(default_factory=dict)

    def line(self, steps: int) -> str:
        step = self.step
        norm = "" if self.grad_norm is None else f"  norm {self.grad_norm:.3g}"
        disk = f"  written {format_bytes(step.disk_bytes_written)}" if step.disk_bytes_written else ""
        left = "" if self.seconds_left is None else f"  {format_seconds(self.seconds_left)} left"
        return (f"step {step.number:>{len(str(steps))}}/{steps}  epoch {self.epoch:.2f}  loss {step.loss:.4f}  mean "
                f"{self.mean_loss:.4f}{norm}  lr {step.lr:.2e}  {step.rate:,.0f} tokens/s ({step.padding:.0%} padding)  "
                f"{step.tflops:.3g} TFLOPS  device {format_bytes(step.device_bytes)}  host {format_bytes(step.host_bytes)}  "
                f"process {format_bytes(step.process_bytes)}{disk}{left}")


def format_seconds(seconds: float) -> str:
    """"45 s", "12 min 05 s", "2 d 03 h"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_rest = divmod(minutes, 60)
    days, hours_rest = divmod(hours, 24)
    if days:
        return f"{days} d {hours_rest:02} h"
    if hours:
        return f"{hours} h {minutes_rest:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


class RunProgress:
    """Makes entries from steps. State: the last losses, and the times when the last steps ended.

    `steps`: number of steps; `batch`: rows per step; `rows`: rows in the data; `losses`: of earlier steps, in order."""

    def __init__(self, steps: int, batch: int, rows: int, losses: Iterable[float] = (),
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._batch, self._rows, self._clock = steps, batch, rows, clock
        self._losses: deque[float] = deque(losses, WINDOW)
        self._ends: deque[float] = deque(maxlen=WINDOW)

    def __call__(self, step: Step) -> Entry:
        self._losses.append(step.loss)
        self._ends.append(self._clock())
        taken = self._ends[-1] - self._ends[0]  # includes evaluations and saves, but not the first step, which compiles
        left = (self._steps - step.number) * taken / (len(self._ends) - 1) if len(self._ends) > 1 else None
        return Entry(step, step.number * self._batch / self._rows, sum(self._losses) / len(self._losses), left)


class ProgressDisplay:
    """Shows a live bar on a terminal, and prints a line every `interval` steps. A log file gets only the lines."""

    def __init__(self, console: Console, steps: int, interval: int, done: int = 0) -> None:
        self._console, self._steps, self._interval, self._first = console, steps, interval, done + 1
        self._progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None), TextColumn("{task.description}"),
            TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("", total=steps, completed=done)
        self._latest = ""
        self._shown = ExitStack()

    def __enter__(self) -> ProgressDisplay:
        self._progress.start()
        if self._console.is_terminal:
            self._shown.enter_context(shown_by(self._under_way))
        return self

    def __exit__(self, *_: object) -> None:
        self._shown.close()
        self._progress.stop()

    def _under_way(self, line: str) -> None:
        """Shows what the step is waiting for instead of the last step's values."""
        self._progress.update(self._task, description=line or self._latest)

    def __call__(self, entry: Entry) -> None:
        """Updates the bar."""
        step = entry.step
        self._latest = (f"loss {step.loss:.4f}  mean {entry.mean_loss:.4f}  {step.rate:,.0f} tokens/s  device "
                        f"{format_bytes(step.device_bytes)}  process {format_bytes(step.process_bytes)}")
        self._progress.update(self._task, completed=step.number, description=self._latest)

    def line(self, entry: Entry) -> None:
        """Prints the line of a step, once all of its values are known."""
        number = entry.step.number
        if number in (self._first, self._steps) or number % self._interval == 0:
            self._console.print(entry.line(self._steps), highlight=False, soft_wrap=True)  # no wrapping in a log file
