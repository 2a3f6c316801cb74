"""One rank's shard of a tile that several ranks share: one run of elements of the slot, of the same length on every rank.

    in a slot         parameter a | parameter b | parameter c
    shards of 4 ranks      0     |     1      |     2     | 3

A rank copies, updates and saves only its shard. The host memory is shared (`system/shared_memory.py`), so every rank can read
the whole tile. Each rank has norms of all parameters' gradients in memory of its own.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from megacompile.runtime.memory.tile_part import CopiedInRuns, TilePart
from megacompile.runtime.memory.tiles import HostTile, TileLayout
from megacompile.system.host_memory import host_memory


@dataclass(frozen=True)
class ShardLayout(TileLayout):
    """The layout of a shard in a slot. It has a slice for each parameter of the whole tile, empty where the shard has none of
    its elements. `shard_elements`: including padding."""

    shard_elements: int = 0

    @classmethod
    def of_rank(cls, layout: TileLayout, rank: int) -> ShardLayout:
        """The layout of a rank's shard of a tile that is divided into `layout.ranks` of them."""
        held = held_by(layout, rank)
        slices, origins = [], []
        for index, s in enumerate(layout.slices):
            first, last = (min(max(edge, held.start), held.stop) for edge in (s.start, s.stop))
            slices.append(replace(s, shape=(last - first,), start=first - held.start))
            origins.append(layout.at_home(index).start + (first - s.start if first < last else 0))
        return cls(layout.name, layout.dtype, tuple(slices), layout.home or layout.name, tuple(origins), layout.ranks,
                   layout.states, held.stop - held.start)

    @property
    def elements(self) -> int:
        return self.shard_elements


def held_by(layout: TileLayout, rank: int) -> slice:
    """The elements of a slot of the whole tile that are in a rank's shard."""
    count = layout.elements // layout.ranks
    return slice(rank * count, (rank + 1) * count)


@dataclass
class TileShard(CopiedInRuns):
    """`whole`: what it is a shard of. `held`: its elements, in a slot of the whole tile."""

    whole: HostTile | TilePart
    held: slice

    @classmethod
    def of(cls, whole: HostTile | TilePart, rank: int) -> TileShard:
        layout = whole.layout
        norms = host_memory(4 * len(layout.slices)).zero_() if layout.trainable else None
        return cls(ShardLayout.of_rank(layout, rank), whole.home, norms, whole, held_by(layout, rank))

    @property
    def runs(self) -> list[tuple[slice, slice]]:
        found = []
        for here, there in self.whole.runs:
            first, last = max(here.start, self.held.start), min(here.stop, self.held.stop)
            if first < last:
                start = there.start + first - here.start
                found.append((slice(first - self.held.start, last - self.held.start), slice(start, start + last - first)))
        return found


#: What one rank copies and updates of a tile.
Share = HostTile | TilePart | TileShard
