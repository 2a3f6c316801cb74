"""One optimizer step on its way through the lanes: what it asks for, and how far it came.

A step counts from the moment when it begins, and no more if it fails, or is refused, before its first tile: what updates
nothing is no step. Where gradients are not finite, the lane that finds out takes the count back; a step that was numbered
meanwhile is numbered one too high, and finds out when it comes to its own clip.
"""
from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any

from megacompile.runtime.kernels import Batch
from megacompile.runtime.optimizer.adam import AdamSegment

#: Held by whoever numbers a step, counts it or takes its count back: callers and lanes.
counting = threading.Lock()

#: Per tile, the norm of each parameter's gradient by name.
Norms = Mapping[str, Mapping[str, float]]


@dataclass(eq=False)
class Update:
    """`segments`: per tile, the runs of its host tile's elements to update with their hyper-parameters; `counted`: per
    tile, the positions of the parameters whose gradients count. `done` tiles were updated already: a step that failed
    half-way is completed by running it again. Of tiles that are `halfway` the weights were, and not the moments. `begun`:
    its parameters' step counts include it. `on_arrival`: tiles are updated before the global norm is known. `kept`: tiles
    that were not updated then, since their own gradients were not finite, with their norms; they are `done` too. `batches`:
    what the gradients are of. `judged`: set once the global norm is known.

    `refused`: its gradients were not finite, and nothing was updated. `report` is called in the lane where any were not, with
    their norms; it may raise."""

    segments: Mapping[str, list[AdamSegment]]
    counted: Mapping[str, list[int]]
    max_grad_norm: float | None = None
    done: set[str] = field(default_factory=set)
    halfway: set[str] = field(default_factory=set)
    norm: float | None = None
    begun: bool = False
    on_arrival: bool = False
    batches: Sequence[Batch] = ()
    refused: bool = False
    kept: dict[str, Mapping[str, float]] = field(default_factory=dict)
    report: Callable[[Update, Norms], None] = lambda update, norms: None
    states: Sequence[dict[str, Any]] = ()  # of the parameters that are counted: each has its "step"
    before: Update | None = None  # the step before it, if it may yet be refused
    judged: threading.Event = field(default_factory=threading.Event)

    @property
    def step(self) -> int:
        """The largest of its parameters' step counts."""
        return max((s.step for segments in self.segments.values() for s in segments), default=0)

    @property
    def open(self) -> bool:
        """Whether it may yet be refused: by its clip, or on arrival by the last of its tiles."""
        return self.begun and (self.done != self.segments.keys() if self.on_arrival else self.norm is None)

    @property
    def has_updated(self) -> bool:
        """Whether some tile is not what it was before the step."""
        return bool(self.done or self.halfway)

    def pending(self, tile: str) -> Sequence[AdamSegment]:
        """What is left to update of a tile, if anything."""
        return () if self.refused or tile in self.done else self.segments.get(tile, ())

    def begin(self) -> None:
        """Counts the step, unless it is one that is being completed."""
        with counting:
            if not self.begun:
                self._count(1)

    def withdraw(self) -> None:
        """After a failure: what has updated no tile is no step."""
        with counting:
            if self.begun and not self.has_updated and not self.refused:
                self._count(-1)
                self._renumber()

    def _count(self, by: int) -> None:
        states = [state for state in self.states if "step" in state]  # the user may have removed some since
        counts = [state["step"] + by for state in states]
        # One call into C, which Ctrl-C does not divide: no parameter is counted and another not, or without `begun`.
        deque(map(dict.__setitem__, [*states, vars(self)], [*repeat("step", len(counts)), "begun"], [*counts, by > 0]),
              maxlen=0)

    def judge(self, norms: Norms) -> None:
        """In the lane that knows all norms, before the first tile is updated: takes the global norm, and refuses the step if
        that is not finite. Raises what `report` raises."""
        squares = 0.0  # one after the other: `sum` compensates from Python 3.12 on, and gives other bits
        for norm in (norm for of_tile in norms.values() for norm in of_tile.values()):
            squares += norm ** 2
        with counting:
            self._renumber()
            self.norm = squares ** 0.5
            if not math.isfinite(self.norm):
                self._count(-1)
                self.refused = True
        self.judged.set()
        if self.refused:
            self.report(self, norms)

    def judge_tile(self, tile: str, norms: Mapping[str, float]) -> None:
        """On arrival, before this tile is updated: keeps it as it is if its gradients are not finite. Raises as `finish`."""
        with counting:
            self._renumber()
        if tile not in self.done and not all(map(math.isfinite, norms.values())):
            self.kept[tile] = norms
            self.finish(tile)

    def finish(self, tile: str) -> None:
        """Nothing is left to do for a tile. With the last one, takes the step's count back if all were kept on arrival, and
        raises what `report` raises if any were."""
        with counting:  # several lanes finish tiles
            self.done.add(tile)
            self.halfway.discard(tile)
            last = self.done == self.segments.keys()
            if last and self.kept.keys() == self.segments.keys():
                self._count(-1)
                self.refused = True
        if last and self.kept:
            self.report(self, self.kept)

    def _renumber(self) -> None:
        """If the step before was refused after this one was numbered, its parameters have had one step less."""
        before, self.before = self.before, None
        if before is None or not before.refused:
            return
        taken = {(tile, s.start) for tile, segments in before.segments.items() for s in segments}
        self.segments = {tile: [replace(s, step=s.step - 1) if (tile, s.start) in taken else s for s in segments]
                         for tile, segments in self.segments.items()}
