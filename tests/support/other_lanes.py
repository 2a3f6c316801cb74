"""Makes an instruction late without sleeping: it waits until no other lane, and not the caller, can continue."""
from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

import pytest
from torch import fx

from megacompile.ir.program import Lane, op_of, operands
from megacompile.runtime.executor import Executor
from megacompile.runtime.frame import Run

#: The events that the caller waits for, and the `wait` instruction at which each other lane stands.
Blocked = tuple[list[threading.Event], dict[Lane, tuple[Run, fx.Node]]]


def waits(run: Run, node: fx.Node) -> bool:
    """Whether an instruction that a lane has begun waits for an event that has not fired."""
    return op_of(node).name == "wait" and not run.events[operands(node, "event")[0]].issued.is_set()


class OtherLanes:
    """Watches an executor's other lanes and its caller while an instruction of one lane holds them up.

    Attributes:
        runs: sections that are not done.
        submitted: number of sections submitted since this object was made.
        awaited: the events that the caller waits for; None while it does something else.
        timed_out: whether an instruction has waited for more than two minutes."""

    def __init__(self, executor: Executor, patch: pytest.MonkeyPatch) -> None:
        self.executor, self.before = executor, executor._runs
        self.runs: list[Run] = []
        self.submitted, self.timed_out = 0, False
        self.awaited: list[threading.Event] | None = None
        submit, wait, idle = executor.submit, executor.wait, executor.idle

        def submitting(*arguments: Any) -> Run:
            run = submit(*arguments)
            self.runs = [each for each in (*self.runs, run) if not all(done.is_set() for done in each.pending.values())]
            self.submitted += 1
            return run

        def waiting(events: Iterable[threading.Event]) -> None:
            self.awaited = list(events)
            try:
                wait(self.awaited)
            finally:
                self.awaited = None

        def idling(*arguments: Any) -> None:
            self.awaited, outer = [threading.Event()], self.awaited  # all lanes, and so the one that holds the others up
            try:
                idle(*arguments)
            finally:
                self.awaited = outer

        patch.setattr(executor, "submit", submitting)
        patch.setattr(executor, "wait", waiting)
        patch.setattr(executor, "idle", idling)

    def hold(self, lane: Lane) -> None:
        """Called by an instruction of the lane before it does anything: waits until all others are done or wait for it."""
        limit = time.monotonic() + 120.0
        while not self.still(lane):
            self.timed_out = time.monotonic() > limit
            assert not self.timed_out, "the other lanes never stand still"
            time.sleep(0)

    def still(self, lane: Lane) -> bool:
        first = self._blocked(lane)
        return first is not None and first == self._blocked(lane)  # an event fires once: nothing has moved between both

    def _blocked(self, lane: Lane) -> Blocked | None:
        """None if the caller or another lane can continue."""
        awaited = self.awaited
        if awaited is None or all(event.is_set() for event in awaited) or self.executor._runs != self.before + self.submitted:
            return None
        found = {}
        for other in {each for run in self.runs for each, done in run.pending.items() if not done.is_set()} - {lane}:
            begun = self.executor.watchdog.begun.get(other)
            if begun is None:
                return None  # between two sections
            if not waits(*begun):
                return None
            found[other] = begun
        return awaited, found
