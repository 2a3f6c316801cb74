"""One optimizer step on its way through the lanes: what it asks for, and how far it came.

A step whose gradients are not finite is refused before it changes anything, and is no step: its parameters' step counts,
which the caller's thread has raised already, are taken back by the lane that found out. A step that was numbered meanwhile is
numbered one too high; it finds out when it begins.
"""
from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .adam import AdamSegment
from .kernels import Batch

#: Held by callers while they count a step and read the counts, and by the lane that takes a step back.
counting = threading.Lock()

#: Per tile, the norm of each parameter's gradient by name.
Norms = Mapping[str, Mapping[str, float]]


@dataclass(eq=False)
class Update:
    """`segments`: per tile, the runs of elements to update with their hyper-parameters; `counted`: per tile, the positions of
    the parameters whose gradients count. `done` tiles were updated already: a step that failed half-way is completed by running
    it again. `failed`, too, until it begins: what updates no tile is no step. `on_arrival`: tiles are updated before the global
    norm is known. `batches`: what the gradients are of.

    `refused`: its gradients were not finite. `report` is then called in the lane, with their norms; it may raise."""

    segments: Mapping[str, list[AdamSegment]]
    counted: Mapping[str, list[int]]
    max_grad_norm: float | None = None
    done: set[str] = field(default_factory=set)
    norm: float | None = None
    failed: bool = True
    on_arrival: bool = False
    batches: Sequence[Batch] = ()
    refused: bool = False
    report: Callable[[Update, Norms], None] = lambda update, norms: None
    states: Sequence[dict[str, Any]] = ()  # of the parameters that are counted: each has its "step"
    before: Update | None = None  # the step before it, if it may yet be refused

    @property
    def step(self) -> int:
        """The largest of its parameters' step counts."""
        return max((s.step for segments in self.segments.values() for s in segments), default=0)

    @property
    def open(self) -> bool:
        """Whether it may yet be refused, by its clip, without an error."""
        return self.norm is None and not self.failed and not self.on_arrival

    def judge(self, norms: Norms) -> None:
        """In the lane that knows all norms, before the first tile is updated: takes the global norm, and refuses the step if
        that is not finite. Raises what `report` raises."""
        squares = 0.0  # one after the other: `sum` compensates from Python 3.12 on, and gives other bits
        for norm in (norm for of_tile in norms.values() for norm in of_tile.values()):
            squares += norm ** 2
        norm = squares ** 0.5
        self._renumber()
        with counting:
            self.norm, self.refused = norm, not math.isfinite(norm)
            if self.refused:
                for state in self.states:
                    state["step"] -= 1
        if self.refused:
            self.report(self, norms)

    def judge_tile(self, tile: str, norms: Mapping[str, float]) -> None:
        """On arrival, before this tile is updated. Raises what `report` raises if its gradients are not finite."""
        if not all(map(math.isfinite, norms.values())):
            self.report(self, {tile: norms})

    def _renumber(self) -> None:
        """If the step before was refused after this one was numbered, its parameters have had one step less."""
        before, self.before = self.before, None
        if before is None or not before.refused:
            return
        taken = {(tile, s.start) for tile, segments in before.segments.items() for s in segments}
        self.segments = {tile: [replace(s, step=s.step - 1) if (tile, s.start) in taken else s for s in segments]
                         for tile, segments in self.segments.items()}
