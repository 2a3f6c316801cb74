"""The segments of an update, in host memory and in a slot, each with its moments there."""
from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megacompile.runtime.memory.shards import Share
from megacompile.runtime.optimizer.host_update import Moments
from megacompile.runtime.optimizer.rule import Segment

#: A segment and its moments.
Pair = tuple[Segment, Moments]


def at_home(segments: Sequence[Segment], tile: Share, run: slice, moments: Sequence[Tensor] | None = None) -> list[Pair]:
    """The parts of segments of a host tile in a run of its elements, with their moments in host memory. They count elements
    from the run's first one. `moments`: the tile's, in a slab; None: where the tile has them."""
    found = (part for s in segments if (part := s.within(run.start, run.stop, 0)))
    return [(s, moments_at_home(s, tile, moments)) for s in sorted(found, key=lambda s: s.start)]


def moments_at_home(segment: Segment, tile: Share, moments: Sequence[Tensor] | None = None) -> Moments:
    home, name = tile.home, tile.layout.slices[segment.position].name
    stop = segment.first + segment.stop - segment.start
    return home.layout.state_layout.at(moments or home.moments, home.layout.position_of[name], segment.first, stop)


def in_slot(segments: Sequence[Segment], tile: Share, moments: Sequence[Tensor]) -> list[Pair]:
    """Segments of a host tile -> segments of the slot that holds a share of it, with their `moments` in a slot of their own."""
    found = (part for here, there in tile.runs for s in segments if (part := s.within(there.start, there.stop, here.start)))
    pairs = []
    for s in sorted(found, key=lambda s: s.start):
        start = s.start - tile.layout.slices[s.position].start
        pairs.append((s, tile.layout.state_layout.at(moments, s.position, start, start + s.stop - s.start)))
    return pairs
