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
    from the run's first one. `moments`: those of the share, in a slab; None: where the tile has them."""
    found = (part for s in segments if (part := s.within(run.start, run.stop, 0)))
    return [(s, moments_at_home(s, tile, moments)) for s in sorted(found, key=lambda s: s.start)]


def moments_at_home(segment: Segment, tile: Share, moments: Sequence[Tensor] | None = None) -> Moments:
    home, name = tile.home, tile.layout.slices[segment.position].name
    count, at = segment.stop - segment.start, home.layout.position_of[name]
    if moments is None:
        return home.layout.state_layout.at(home.moments, at, segment.first, segment.first + count)
    first = segment.first - (tile.layout.at_home(segment.position).start - home.layout.slices[at].start)
    return tile.layout.state_layout.at(moments, segment.position, first, first + count)


def in_slot(segments: Sequence[Segment], tile: Share, moments: Sequence[Tensor]) -> list[Pair]:
    """Segments of a host tile -> segments of the slot that holds a share of it, with their `moments` in a slot of their own."""
    found = (part for here, there in tile.runs for s in segments if (part := s.within(there.start, there.stop, here.start)))
    pairs = []
    for s in sorted(found, key=lambda s: s.start):
        start = s.start - tile.layout.slices[s.position].start
        pairs.append((s, tile.layout.state_layout.at(moments, s.position, start, start + s.stop - s.start)))
    return pairs
