"""One rank's shard of a tile that several ranks share: one run of elements of the slot, of the same length on every rank.

    in a slot         parameter a | parameter b | parameter c
    shards of 4 ranks      0     |     1      |     2     | 3

A rank copies, updates and saves only its shard. The host memory is shared (`system/shared_memory.py`), so every rank can read
the whole tile. Each rank has norms of all parameters' gradients in memory of its own.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from megacompile.runtime.memory.tile_part import TilePart
from megacompile.runtime.memory.tiles import HostTile, TileLayout
from megacompile.system.host_memory import host_memory


@dataclass(frozen=True)
class ShardLayout(TileLayout):
    """The layout of a shard in a slot. It has a slice for each parameter of the whole tile, empty where the shard has none of
    its elements. `shard_elements`: including padding."""

    shard_elements: int = 0

    @property
    def elements(self) -> int:
        return self.shard_elements


@dataclass
class TileShard:
    """`layout`: the shard in a slot. `whole`: what it is a shard of. `held`: its elements, in a slot of the whole tile.
    `norm_bytes`: uint8, one FP32 norm for each parameter; None if nothing is trained."""

    layout: ShardLayout
    whole: HostTile | TilePart
    held: slice
    norm_bytes: Tensor | None

    @classmethod
    def of(cls, whole: HostTile | TilePart, rank: int) -> TileShard:
        layout = whole.layout
        count = layout.elements // layout.ranks
        held = slice(rank * count, (rank + 1) * count)
        slices, origins = [], []
        for index, s in enumerate(layout.slices):
            first, last = (min(max(edge, held.start), held.stop) for edge in (s.start, s.stop))
            slices.append(replace(s, shape=(last - first,), start=first - held.start))
            origins.append(layout.at_home(index).start + (first - s.start if first < last else 0))
        shard = ShardLayout(layout.name, layout.dtype, tuple(slices), layout.home or layout.name, tuple(origins), layout.ranks,
                            layout.states, count)
        norms = host_memory(4 * len(layout.slices)).zero_() if layout.trainable else None
        return cls(shard, whole, held, norms)

    @property
    def home(self) -> HostTile:
        return self.whole.home

    @property
    def runs(self) -> list[tuple[slice, slice]]:
        """Elements of the shard in a slot, and the same elements of the host tile."""
        found = []
        for here, there in self.whole.runs:
            first, last = max(here.start, self.held.start), min(here.stop, self.held.stop)
            if first < last:
                start = there.start + first - here.start
                found.append((slice(first - self.held.start, last - self.held.start), slice(start, start + last - first)))
        return found

    def weights_with(self, memory: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes of a slot or slab, and the host's bytes of the same weights."""
        yield from self._bytes_with(memory, self.home.weights)

    def gradients_with(self, memory: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes of a slot or slab, and the host's bytes of the same gradients, then this rank's norms."""
        assert self.home.gradients is not None and self.norm_bytes is not None, f"{self.layout.name} has no gradients"
        yield from self._bytes_with(memory, self.home.gradients)
        yield memory[self.layout.weight_bytes:self.layout.gradient_bytes], self.norm_bytes

    def _bytes_with(self, memory: Tensor, home: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        size = self.layout.dtype.itemsize
        for here, there in self.runs:
            yield memory[here.start * size:here.stop * size], home[there.start * size:there.stop * size]


#: What one rank copies and updates of a tile.
Share = HostTile | TilePart | TileShard
