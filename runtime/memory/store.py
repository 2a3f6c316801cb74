"""The tiles of a model, by name, and what is kept of them beside: parts, sums, the snapshot that is being read."""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megacompile.errors import InsufficientMemoryError
from megacompile.runtime.memory.snapshot import Snapshot
from megacompile.runtime.memory.tile_part import TilePart
from megacompile.runtime.memory.tiles import HostTile
from megacompile.system.host_memory import available_host_bytes, host_memory


@dataclass
class Store:
    """All tiles of a streamed model, in the order of the model's calls, and the `parts` that some are streamed in. Whoever
    changes state that a checkpoint holds calls `preserve` first: a `snapshot` may not have been written yet."""

    tiles: dict[str, HostTile] = field(default_factory=dict)
    parts: dict[str, TilePart] = field(default_factory=dict)
    snapshot: Snapshot | None = None

    def __getitem__(self, name: str) -> HostTile | TilePart:
        """What is streamed under a name."""
        return self.parts[name] if name in self.parts else self.tiles[name]

    def streamed_memory(self) -> Iterator[Tensor]:
        """What copies over the link read and write."""
        for tile in self.tiles.values():
            yield from (part for part in (tile.weights, tile.gradients) if part is not None)
        yield from (part.norm_bytes for part in self.parts.values() if part.norm_bytes is not None)

    def allocate_sums(self, tiles: Iterable[str]) -> None:
        """Memory for FP32 sums of gradients, where these tiles have none yet. Raises `InsufficientMemoryError`; then nothing
        has changed."""
        homes = {name: self[name].home for name in tiles}
        missing = [tile for tile in {id(each): each for each in homes.values()}.values()
                   if tile.sums is None and tile.layout.trainable]
        needed = sum(tile.layout.sum_bytes for tile in missing)
        if needed and needed > (available := available_host_bytes()):
            raise InsufficientMemoryError(
                f"sums of gradients over waves take {needed} bytes of host memory, and {available} are available: use one wave "
                "(waves=1), or a machine with more memory")
        for tile in missing:
            tile.sums = host_memory(tile.layout.sum_bytes).view(torch.float32)

    def room(self, budget: int | None = None) -> int:
        """Bytes of host memory that these tiles, weights and gradients filled and nothing else yet, have with what is left; at
        most `budget`."""
        parts = self.bytes()
        there = available_host_bytes() + parts.get("weights", 0) + parts.get("gradients", 0)
        return min(there, budget or there)

    def drop_sums(self) -> None:
        """Gives their memory back."""
        for tile in self.tiles.values():
            tile.sums = None

    def preserve(self, *names: str) -> None:
        """Returns when these tiles (all, if none is named) may change. May wait for a checkpoint's writer."""
        if (snapshot := self.snapshot) is not None:  # its writer forgets it when it is done
            for name in names or self.tiles:
                snapshot.preserve(self[name].home.layout.name)

    def bytes(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for tile in self.tiles.values():
            for part, size in tile.parts().items():
                total[part] = total.get(part, 0) + size
        return total
