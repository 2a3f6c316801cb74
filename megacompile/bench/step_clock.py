"""Measures how long each step of a row takes, how many tokens it computes, and how long garbage collections take."""
from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import transformers

from megacompile.bench.rows import Row


class Clock(transformers.TrainerCallback):
    """Records when the loss of each step is known, in seconds since the first step began.

    For Trainer, a step ends when its loss is logged and not in `on_step_end`, when the device is still working: waiting for it
    would count for the next step. The time until `on_step_end` is the time to submit the step. `wait` is called before the
    clock is read. `computed` returns the number of tokens that all steps so far have computed, including padding.
    """

    def __init__(self, wait: Callable[[], None] = lambda: None, computed: Callable[[], int] = lambda: 0) -> None:
        self.wait, self.computed, self.began = wait, computed, math.nan
        self.ends: list[float] = []
        self.submitted_by: list[float] = []  # when each step was submitted; only for Trainer
        self.computed_by: list[int] = []  # tokens computed by the end of each step

    def begin(self) -> None:
        self.began = time.perf_counter()

    def tick(self) -> None:
        self.wait()
        self.ends.append(time.perf_counter() - self.began)
        self.computed_by.append(self.computed())

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.submitted_by.append(time.perf_counter() - self.began)

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        if "loss" in logs:
            self.tick()

    @property
    def times(self) -> list[float]:
        """The duration of each step in seconds."""
        return _differences(self.ends)

    @property
    def submitting(self) -> list[float]:
        """The seconds from the end of the previous step until each step was submitted, including the time to collate its
        batch."""
        return [at - before for before, at in zip([0.0, *self.ends], self.submitted_by, strict=False)]

    @property
    def tokens(self) -> list[int]:
        """The number of tokens that each step computed."""
        return _differences(self.computed_by)


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


def step_fields(warm_up: int, times: Sequence[float], useful: Sequence[int], computed: Sequence[int]) -> Row:
    """The fields of a row about its steps, from the seconds, useful tokens and computed tokens of each. The duration of a step
    depends on its number of tokens, so `slowest_over_median_by_token` compares seconds per computed token."""
    median = statistics.median(times[warm_up:])
    by_token = [seconds / tokens for seconds, tokens in zip(times, computed, strict=True)]
    return dict(
        step_s=round(median, 4), times_s=[round(t, 4) for t in times], first_step_s=round(times[0], 2),
        slowest_over_median=round(max(times[2:]) / median, 3),
        slowest_over_median_by_token=round(max(by_token[2:]) / statistics.median(by_token[warm_up:]), 3),
        useful_tokens=list(useful), computed_tokens=list(computed))
