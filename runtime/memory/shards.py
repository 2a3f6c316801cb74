"""One rank's shard of a tile that several ranks share: one run of elements of the slot, of the same length on every rank.

    in a slot         parameter a | parameter b | parameter c
    shards of 4 ranks      0     |     1      |     2     | 3

A rank copies, updates and saves only its shard. The host memory is shared (`system/shared_memory.py`), so every rank can read
the whole tile. Each rank has norms of all parameters' gradients in memory of its own.
"""
from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from megacompile.runtime.memory.tiles import HostTile, TileLayout
from megacompile.runtime.optimizer.host_update import Moments
from megacompile.runtime.optimizer.rule import Segment
from megacompile.system.host_memory import host_memory


# -------------------- A part of a host tile that is streamed as a separate tile: some of the experts of a layer
#
#     host tile    gate_up of experts 0 1 2 3 | down of experts 0 1 2 3
#     in a slot    gate_up of experts     2 3 | down of experts     2 3
#
# In host memory each parameter is contiguous; a part is one run of elements of each parameter. One copy per run crosses the
# link, besides the norms. Norms of gradients belong to parts and have their own memory: a parameter has one norm for each part.
@dataclass
class CopiedInRuns:
    """A slot and a host tile that are copied in several runs of elements. `layout`: of the slot. `home`: the host tile.
    `norm_bytes`: uint8, one FP32 norm for each parameter, in separate memory; None if nothing is trained."""

    layout: TileLayout
    home: HostTile
    norm_bytes: Tensor | None

    @property
    @abstractmethod
    def runs(self) -> list[tuple[slice, slice]]:
        """Elements in a slot, and the same elements of the host tile."""

    def weights_with(self, memory: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes of a slot or slab, and the matching bytes of the host's weights."""
        yield from self._bytes_with(memory, self.home.weights)

    def gradients_with(self, memory: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes of a slot or slab, and the matching bytes of the host's gradients, then the norms."""
        assert self.home.gradients is not None and self.norm_bytes is not None, f"{self.layout.name} has no gradients"
        yield from self._bytes_with(memory, self.home.gradients)
        yield memory[self.layout.weight_bytes:self.layout.gradient_bytes], self.norm_bytes

    def _bytes_with(self, memory: Tensor, home: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        size = self.layout.dtype.itemsize
        for here, there in self.runs:
            yield memory[here.start * size:here.stop * size], home[there.start * size:there.stop * size]


class TilePart(CopiedInRuns):
    """A part of a host tile that programs treat as a tile."""

    @classmethod
    def of(cls, layout: TileLayout, home: HostTile) -> TilePart:
        return cls(layout, home, host_memory(4 * len(layout.slices)).zero_() if layout.trainable else None)

    @property
    def held(self) -> slice:
        """The elements of the part's slot that a single rank copies and updates: all."""
        return slice(0, self.layout.elements)

    @property
    def runs(self) -> list[tuple[slice, slice]]:
        return [(slice(s.start, s.stop), self.layout.at_home(i)) for i, s in enumerate(self.layout.slices)]


def rows_with(tile: HostTile | TilePart, memory: Tensor, rows: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Bytes of a slot, and the matching bytes of the host's weights, of some rows (along the first dimension) of each
    parameter. `rows` are in order; consecutive ones are one run."""
    runs: list[slice] = []
    for row in rows:
        joined = bool(runs) and runs[-1].stop == row
        runs.append(slice(runs.pop().start if joined else row, row + 1))
    size = tile.layout.dtype.itemsize
    for position, s in enumerate(tile.layout.slices):
        each, at, home = size * s.count // s.shape[0], size * s.start, size * tile.layout.at_home(position).start
        for run in runs:
            here, there = (slice(start + run.start * each, start + run.stop * each) for start in (at, home))
            yield memory[here], tile.home.weights[there]


@dataclass(frozen=True)
class ShardLayout(TileLayout):
    """The layout of a shard in a slot. It has a slice for each parameter of the whole tile, which is empty if the shard has
    none of its elements. `shard_elements`: including padding."""

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

    @functools.cached_property
    def elements(self) -> int:
        return self.shard_elements


def held_by(layout: TileLayout, rank: int) -> slice:
    """The elements of a whole tile's slot that are in a rank's shard."""
    count = layout.elements // layout.ranks
    return slice(rank * count, (rank + 1) * count)


@dataclass
class TileShard(CopiedInRuns):
    """`whole`: the tile, or part of one, that is divided. `held`: the shard's elements, in a slot of the whole tile."""

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


#: The part of a tile that one rank copies and updates.
Share = HostTile | TilePart | TileShard


# -------------------- The segments of an update, in host memory and in a slot, each with its moments there
#: A segment and its moments.
Pair = tuple[Segment, Moments]


def at_home(segments: Sequence[Segment], tile: Share, run: slice, moments: Sequence[Tensor] | None = None) -> list[Pair]:
    """The parts of a host tile's segments in a run of its elements, with their moments in host memory. Elements are counted
    from the run's first one. `moments`: of the share, in a slab; None: where the tile has them."""
    found = (part for s in segments if (part := s.within(run.start, run.stop, 0)))
    return [(s, moments_at_home(s, tile, moments)) for s in sorted(found, key=lambda s: s.start)]


def moments_at_home(segment: Segment, tile: Share, moments: Sequence[Tensor] | None = None) -> Moments:
    home, name = tile.home, tile.layout.slices[segment.position].name
    count, at = segment.stop - segment.start, home.layout.position_of[name]
    if moments is None:
        return home.layout.state_layout.at(home.moments, at, segment.first, segment.first + count)
    first = segment.first - (tile.layout.at_home(segment.position).start - home.layout.slices[at].start)
    return tile.layout.state_layout.at(moments, segment.position, first, first + count)


def in_slot(segments: Sequence[Segment], tile: Share, moments: Callable[[int, int, int], Moments]) -> list[Pair]:
    """Segments of a host tile -> segments of the slot that holds a share of it, with their moments in a separate slot
    (`State.at`)."""
    found = (part for here, there in tile.runs for s in segments if (part := s.within(there.start, there.stop, here.start)))
    pairs = []
    for s in sorted(found, key=lambda s: s.start):
        start = s.start - tile.layout.slices[s.position].start
        pairs.append((s, moments(s.position, start, start + s.stop - s.start)))
    return pairs
