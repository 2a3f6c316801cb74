"""Where the host tiles of a model are allocated: in memory of this process, or in memory that all ranks share."""
from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

from megacompile.runtime.memory.tiles import HostTile, TileLayout, weights_piece
from megacompile.runtime.ranks import Ranks

T = TypeVar("T")


class TileMemory:
    """Memory of this process. `writes`: whether this process writes the values of a model that is in memory."""

    writes = True

    def allocate(self, layout: TileLayout) -> HostTile:
        return HostTile.allocate(layout)

    def share(self, work: Collection[T]) -> list[T]:
        """The part of some work, the same on every rank, that this process does."""
        return list(work)


class SharedTileMemory(TileMemory):
    """Memory that all ranks of a host map. Rank 0's values are those of the model, as with `DistributedDataParallel`, so other
    hosts write nothing: their copies come from the first host. Raises `RankError` if the ranks' models differ."""

    def __init__(self, layouts: Collection[TileLayout], ranks: Ranks) -> None:
        self._ranks = ranks
        self.writes = ranks.rank == 0
        ranks.agree_on("stream", "model", [repr(layout) for layout in layouts])
        pieces = {name: size for layout in layouts for name, size in layout.shared_pieces().items()}
        weights = {weights_piece(layout.name) for layout in layouts}
        # Apart, since weights stay with the model when it is closed, and a file's pages are freed together.
        self._weights = ranks.shared_memory({name: size for name, size in pieces.items() if name in weights})
        self._training = ranks.shared_memory({name: size for name, size in pieces.items() if name not in weights})

    def allocate(self, layout: TileLayout) -> HostTile:
        return HostTile.allocate(layout, self._training, self._weights.piece(weights_piece(layout.name)))

    def share(self, work: Collection[T]) -> list[T]:
        hosts = self._ranks.hosts
        return list(work)[hosts.local::hosts.ranks] if hosts.host == 0 else []
