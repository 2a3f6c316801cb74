"""A part of a host tile that is streamed as a separate tile: some of the experts of a layer.

    host tile    gate_up of experts 0 1 2 3 | down of experts 0 1 2 3
    in a slot    gate_up of experts     2 3 | down of experts     2 3

In host memory each parameter is contiguous; a part is one run of elements of each parameter. One copy per run crosses the link,
besides the norms. Norms of gradients belong to parts and have their own memory: a parameter has one norm for each part.
"""
from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from megacompile.runtime.memory.tiles import HostTile, TileLayout
from megacompile.system.host_memory import host_memory


@dataclass
class CopiedInRuns:
    """What is copied between a slot and a host tile in several runs of elements. `layout`: in the slot. `home`: the host tile.
    `norm_bytes`: uint8, one FP32 norm for each parameter, in memory of its own; None if nothing is trained."""

    layout: TileLayout
    home: HostTile
    norm_bytes: Tensor | None

    @property
    @abstractmethod
    def runs(self) -> list[tuple[slice, slice]]:
        """Elements in a slot, and the same elements of the host tile."""

    def weights_with(self, memory: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes of a slot or slab, and the host's bytes of the same weights."""
        yield from self._bytes_with(memory, self.home.weights)

    def gradients_with(self, memory: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes of a slot or slab, and the host's bytes of the same gradients, then the norms."""
        assert self.home.gradients is not None and self.norm_bytes is not None, f"{self.layout.name} has no gradients"
        yield from self._bytes_with(memory, self.home.gradients)
        yield memory[self.layout.weight_bytes:self.layout.gradient_bytes], self.norm_bytes

    def _bytes_with(self, memory: Tensor, home: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        size = self.layout.dtype.itemsize
        for here, there in self.runs:
            yield memory[here.start * size:here.stop * size], home[there.start * size:there.stop * size]


class TilePart(CopiedInRuns):
    """A part of a host tile that is a tile of its own in programs."""

    @classmethod
    def of(cls, layout: TileLayout, home: HostTile) -> TilePart:
        return cls(layout, home, host_memory(4 * len(layout.slices)).zero_() if layout.trainable else None)

    @property
    def held(self) -> slice:
        """The elements of a slot of the whole part that one rank alone copies and updates: all."""
        return slice(0, self.layout.elements)

    @property
    def runs(self) -> list[tuple[slice, slice]]:
        return [(slice(s.start, s.stop), self.layout.at_home(i)) for i, s in enumerate(self.layout.slices)]
