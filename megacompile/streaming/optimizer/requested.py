"""The segments of an update that an optimizer requests: which elements of which tiles, with which options."""
from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megacompile.runtime.memory.state_layout import ElementState
from megacompile.runtime.optimizer.rule import MatrixRule, Segment
from megacompile.streaming.optimizer.state import ParameterState, StateMemory
from megacompile.weights.tiling import Tiling


@dataclass(frozen=True)
class GroupOptions:
    """A copy of a group's options: `elementwise`, as the elementwise rule reads them; and all, for the `matrix_rule`."""

    elementwise: Any
    all: Mapping[str, Any]
    matrix_rule: MatrixRule | None

    def of(self, shape: tuple[int, ...], state: ElementState) -> Any:
        """What is read for a parameter of this shape with this state."""
        if not state.whole:
            return self.elementwise
        assert self.matrix_rule is not None, "the state of a rule that the optimizer does not have"
        return self.matrix_rule.options_of(self.all, shape)


#: A parameter that is to be updated: its options, the memory of its state, and the state.
Ready = tuple[GroupOptions, StateMemory, ParameterState]


def segments_of(tiling: Tiling, ready: Sequence[Ready]) -> dict[str, list[Segment]]:
    """For each tile, the runs of its host tile's elements to update, ascending. Called while steps are counted."""
    found: dict[str, list[Segment]] = {}
    for options, memory, state in ready:
        seed = zlib.crc32(memory.name.encode())
        for tile, position in tiling.streamed_at[memory.name]:
            layout = tiling.layouts[tile]
            part, read = layout.at_home(position), options.of(layout.slices[position].shape, memory.kept)
            found.setdefault(tile, []).append(
                Segment(part.start, part.stop, read, state["step"] + 1, part.start - memory.start, seed, position))
    for segments in found.values():
        segments.sort(key=lambda s: s.start)
    return found


def positions_of(tiling: Tiling, names: Iterable[str]) -> dict[str, list[int]]:
    """The positions of the parameters with these names in each tile, ascending."""
    found: dict[str, list[int]] = {}
    for name in names:
        for tile, position in tiling.streamed_at[name]:
            found.setdefault(tile, []).append(position)
    return {tile: sorted(positions) for tile, positions in found.items()}


def matrix_positions(tiling: Tiling, segments: Mapping[str, Sequence[Segment]]) -> dict[str, frozenset[int]]:
    """For each tile, the positions of the parameters that are updated by whole matrices."""
    found = {tile: frozenset(s.position for s in each if tiling.layouts[tile].state_of(s.position).whole)
             for tile, each in segments.items()}
    return {tile: positions for tile, positions in found.items() if positions}
