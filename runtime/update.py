"""One optimizer step on its way through the lanes: its parameters, and its progress.

A step is counted when it begins. The count is rolled back if the step fails or is refused before it updates a tile. If
gradients are not finite, the lane that notices rolls the count back. A step that was numbered in the meantime has a number that
is one too high; it corrects this at its own clip.
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
from megacompile.runtime.optimizer.rule import MatrixRule, Rule, Segment

#: Held while a step is numbered or counted, or its count is rolled back, by callers and lanes.
counting = threading.Lock()

#: Per tile, the norm of each parameter's gradient by name.
Norms = Mapping[str, Mapping[str, float]]


@dataclass(eq=False)
class Update:
    """One optimizer step. `rule`: updates elements. `segments`: for each tile, the runs of its host tile's elements to update,
    with their hyper-parameters. `matrices`: for each tile, the positions of the parameters that `matrix_rule` updates instead.
    `counted`: for each tile, the positions of the parameters whose gradients count in the norm.

    `done`: updated tiles; running a failed step again updates the others. `halfway`: tiles whose weights are updated but not
    their moments. `unwritten`: updated tiles whose moments are still in a slab, not on disk. `begun`: the parameters' step
    counts include this step. `on_arrival`: tiles are updated before the global norm is known. `kept`: tiles that were not
    updated on arrival because their own gradients were not finite, with their norms; they are `done` too. `batches`: the
    batches of the gradients. `judged`: set once the global norm is known. `refused`: gradients were not finite, and nothing was
    updated. `report` is called, with the norms, in the lane that finds gradients that are not finite. It may raise."""

    rule: Rule
    segments: Mapping[str, list[Segment]]
    counted: Mapping[str, list[int]]
    max_grad_norm: float | None = None
    done: set[str] = field(default_factory=set)
    halfway: set[str] = field(default_factory=set)
    unwritten: set[str] = field(default_factory=set)
    norm: float | None = None
    begun: bool = False
    on_arrival: bool = False
    batches: Sequence[Batch] = ()
    refused: bool = False
    kept: dict[str, Mapping[str, float]] = field(default_factory=dict)
    report: Callable[[Update, Norms], None] = lambda update, norms: None
    states: Sequence[dict[str, Any]] = ()  # of the counted parameters: each has a "step"
    before: Update | None = None  # the previous step, if it may still be refused
    matrix_rule: MatrixRule | None = None
    matrices: Mapping[str, frozenset[int]] = field(default_factory=dict)
    judged: threading.Event = field(default_factory=threading.Event)

    @property
    def step(self) -> int:
        """The largest step count of the parameters."""
        return max((s.step for segments in self.segments.values() for s in segments), default=0)

    @property
    def open(self) -> bool:
        """True if the step may still be refused: at its clip, or, on arrival, at its last tile."""
        return self.begun and (self.done != self.segments.keys() if self.on_arrival else self.norm is None)

    @property
    def has_updated(self) -> bool:
        """True if the step has changed any tile."""
        return bool(self.done or self.halfway or self.unwritten)

    def pending(self, tile: str) -> Sequence[Segment]:
        """The segments of a tile that are still to be updated."""
        return () if self.refused or tile in self.done or tile in self.unwritten else self.segments.get(tile, ())

    def divided(self, tile: str, segments: Sequence[Segment]) -> tuple[list[Segment], list[Segment]]:
        """Two lists of a tile's segments: those updated element by element, and those that `matrix_rule` updates."""
        whole = self.matrices.get(tile, frozenset())
        return [s for s in segments if s.position not in whole], [s for s in segments if s.position in whole]

    def begin(self) -> None:
        """Increases the step counts, unless that was done before the step failed."""
        with counting:
            if not self.begun:
                self._count(1)

    def withdraw(self) -> None:
        """Restores the step counts after a failure if no tile was updated."""
        with counting:
            if self.begun and not self.has_updated and not self.refused:
                self._count(-1)
                self._renumber()

    def _count(self, by: int) -> None:
        states = [state for state in self.states if "step" in state]  # the user may have removed some since
        counts = [state["step"] + by for state in states]
        # One call into C, which Ctrl-C cannot interrupt: the counts of all parameters and `begun` change together.
        deque(map(dict.__setitem__, [*states, vars(self)], [*repeat("step", len(counts)), "begun"], [*counts, by > 0]),
              maxlen=0)

    def judge(self, norms: Norms) -> None:
        """Called in the lane that knows all norms, before the first tile is updated. Computes the global norm, and refuses the
        step if it is not finite. Raises what `report` raises."""
        squares = 0.0  # a plain loop: from Python 3.12 on `sum` compensates for rounding, which gives other bits
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
        """Called on arrival before this tile is updated. Leaves it unchanged if its gradients are not finite. Raises as
        `finish`."""
        with counting:
            self._renumber()
        if tile not in self.done and not all(map(math.isfinite, norms.values())):
            self.kept[tile] = norms
            self.finish(tile)

    def finish(self, tile: str) -> None:
        """Marks a tile as done. At the last tile, restores the step counts if all tiles were kept on arrival, and reports if
        any were. Raises what `report` raises."""
        with counting:  # several lanes finish tiles
            self.done.add(tile)
            self.halfway.discard(tile)
            self.unwritten.discard(tile)
            last = self.done == self.segments.keys()
            if last and self.kept.keys() == self.segments.keys():
                self._count(-1)
                self.refused = True
            if last or not self.on_arrival:
                self.states = ()  # the count stays: the optimizer's state can be freed with the optimizer
        if last and self.kept:
            self.report(self, self.kept)

    def _renumber(self) -> None:
        """Lowers this step's numbers by one if the previous step was refused after this one was numbered."""
        before, self.before = self.before, None
        if before is None or not before.refused:
            return
        taken = {(tile, s.start) for tile, segments in before.segments.items() for s in segments}
        self.segments = {tile: [replace(s, step=s.step - 1) if (tile, s.start) in taken else s for s in segments]
                         for tile, segments in self.segments.items()}
