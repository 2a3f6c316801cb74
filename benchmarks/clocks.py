"""Clocks of benchmarks: of phases, of steps, of garbage collections; and the device's SM clock and power during timed steps."""
from __future__ import annotations

import contextlib
import gc
import math
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers

#: Column of nvidia-smi -> field of a row.
QUERY = {"clocks.sm": "sm_clock_mhz", "power.draw": "power_w"}
INTERVAL_MS = 200


def _command(index: str) -> list[str]:
    return ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits", "-lms", str(INTERVAL_MS),
            "-i", index]


@contextlib.contextmanager
def sampled(device: str) -> Iterator[dict[str, float]]:
    """A context that yields a dict and fills it at the end with medians over its duration. The dict stays empty on a CPU,
    without nvidia-smi, and if nvidia-smi reports nothing."""
    found: dict[str, float] = {}
    if torch.device(device).type != "cuda" or shutil.which("nvidia-smi") is None:
        yield found
        return
    # Uses the UUID, since nvidia-smi's indices include devices that CUDA_VISIBLE_DEVICES hides.
    index = "GPU-" + str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
    process = subprocess.Popen(_command(index), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield found
    finally:
        process.terminate()
        printed, _ = process.communicate()
        found.update(medians(printed))


def medians(printed: str) -> dict[str, float]:
    """The medians of lines such as "1480, 690.31". Values that are not numbers ("[N/A]") and incomplete lines are skipped."""
    lines = [line.split(",") for line in printed.splitlines()]
    samples = {field: [float(line[i]) for line in lines if len(line) == len(QUERY) and _is_number(line[i])]
               for i, field in enumerate(QUERY.values())}
    return {field: statistics.median(values) for field, values in samples.items() if values}


def _is_number(text: str) -> bool:
    return text.strip().replace(".", "", 1).isdigit()


class PhaseClock:
    """Counts the seconds of phases. A phase that begins inside another one pauses it, so that no second counts twice. Time
    outside of all phases counts as `outside`.

    `wait` is called whenever a phase begins or ends: it waits for the device, whose work then counts for the phase that issued
    it."""

    def __init__(self, wait: Callable[[], None], outside: str) -> None:
        self._wait, self._open = wait, [outside]
        self._seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def begin(self, phase: str) -> None:
        self._count()
        self._open.append(phase)

    def end(self) -> None:
        """Ends the phase that began last."""
        self._count()
        self._open.pop()

    @contextlib.contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """A context whose time counts for a phase."""
        self.begin(phase)
        try:
            yield
        finally:
            self.end()

    def taken(self) -> dict[str, float]:
        """The seconds of each phase since the last call, or since the clock was made."""
        self._count()
        found, self._seconds = self._seconds, {}
        return found

    def _count(self) -> None:
        self._wait()
        now, phase = time.perf_counter(), self._open[-1]
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._since
        self._since = now


class Clock(transformers.TrainerCallback):
    """Records when losses become known, in seconds since the first step began.

    Trainer waits for the device when it logs a loss, so that is when the clock is read, and the steps since the last log are
    one interval. `wait` is called before the clock is read. `computed` returns the number of tokens that all steps so far have
    computed, including padding.
    """

    def __init__(self, wait: Callable[[], None] = lambda: None, computed: Callable[[], int] = lambda: 0) -> None:
        self.wait, self.computed, self.began = wait, computed, math.nan
        self.ends: list[float] = []
        self.steps_by: list[int] = []  # number of steps by the end of each interval
        self.computed_by: list[int] = []  # tokens computed by the end of each interval

    def begin(self) -> None:
        self.began = time.perf_counter()

    def tick(self, step: int | None = None) -> None:
        """Ends an interval after step number `step`. None: the interval is one step."""
        self.wait()
        self.ends.append(time.perf_counter() - self.began)
        self.steps_by.append(step or sum(self.steps_by[-1:]) + 1)
        self.computed_by.append(self.computed())

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.begin()

    def on_log(self, _: Any, state: transformers.TrainerState, *__: Any, logs: dict[str, Any], **___: Any) -> None:
        if "loss" in logs:
            self.tick(state.global_step)

    def on_train_end(self, _: Any, state: transformers.TrainerState, *__: Any, **___: Any) -> None:
        if self.steps_by and state.global_step > self.steps_by[-1]:
            self.tick(state.global_step)

    @property
    def steps(self) -> list[int]:
        """The number of steps in each interval."""
        return _differences(self.steps_by)

    @property
    def times(self) -> list[float]:
        """The seconds per step in each interval."""
        return [seconds / count for seconds, count in zip(_differences(self.ends), self.steps, strict=True)]

    @property
    def tokens(self) -> list[int]:
        """The number of tokens that a step computed in each interval, on average."""
        return [round(tokens / count) for tokens, count in zip(_differences(self.computed_by), self.steps, strict=True)]

    def averages(self, of_steps: Sequence[int]) -> list[int]:
        """The average of numbers that steps have, over the steps of each interval."""
        return [round(statistics.mean(of_steps[end - count:end])) for count, end in zip(self.steps, self.steps_by, strict=True)]

    def warm_up(self, steps: int) -> int:
        """The number of intervals until so many steps are done."""
        return sum(end - count < steps for count, end in zip(self.steps, self.steps_by, strict=True))


def _differences(sums: Sequence[Any]) -> list[Any]:
    return [end - start for start, end in zip([0, *sums], sums, strict=False)]


@contextlib.contextmanager
def collections() -> Iterator[list[tuple[float, float]]]:
    """A context that records Python's full garbage collections: when each ended (`time.perf_counter`), and its duration in
    seconds."""
    found: list[tuple[float, float]] = []
    began = 0.0

    def note(phase: str, which: dict[str, int]) -> None:
        nonlocal began
        now = time.perf_counter()
        if phase == "start":
            began = now
        elif which["generation"] == 2:
            found.append((now, now - began))

    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


def step_fields(warm_up: int, times: Sequence[float], useful: Sequence[int], computed: Sequence[int]) -> dict[str, Any]:
    """The fields of a row about its steps, from the seconds, useful tokens and computed tokens per step in each interval, of
    which the first `warm_up` ones do not count. The duration of a step depends on its number of tokens, so
    `slowest_over_median_by_token` compares seconds per computed token."""
    median = statistics.median(times[warm_up:])
    by_token = [seconds / tokens for seconds, tokens in zip(times, computed, strict=True)]
    return dict(
        step_s=round(median, 4), times_s=[round(t, 4) for t in times], first_step_s=round(times[0], 2),
        slowest_over_median=round(max(times[2:] or times[-1:]) / median, 3),
        slowest_over_median_by_token=round(max(by_token[2:] or by_token[-1:]) / statistics.median(by_token[warm_up:]), 3),
        useful_tokens=list(useful), computed_tokens=list(computed))
