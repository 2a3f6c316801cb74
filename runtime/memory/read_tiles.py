"""Which tiles of a snapshot the writers of all ranks have read or copied.

Each tile of a checkpoint is written by one rank, and each rank updates a shard of every tile. So before its update, a rank also
waits for the writers of others. A writer's own rank runs the same update, which makes it copy the tile: nobody waits long.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

#: How long a wait sleeps between two looks at the tile, and how often it looks at the other ranks, in seconds.
_PAUSE_S, _LOOK_S = 5e-4, 0.05


class ReadTiles:
    """`memory`: uint8 [tiles], zeros, shared by all ranks: 1 where a tile may change. `tiles`: all, in the same order on every
    rank. `check` raises `RankError` if another rank has ended or has failed."""

    def __init__(self, memory: Tensor, tiles: Sequence[str], check: Callable[[], None]) -> None:
        self.tiles, self._memory, self._check = tuple(tiles), memory, check
        self._indexes = {name: index for index, name in enumerate(tiles)}

    def mark(self, *names: str) -> None:
        """These tiles may change."""
        for name in names:
            self._memory[self._indexes[name]] = 1

    def wait(self, *names: str) -> None:
        """Returns once these tiles (all, if none is named) may change. Raises `RankError`."""
        looked = time.monotonic()
        for index in map(self._indexes.__getitem__, names or self._indexes):
            while not self._memory[index]:
                time.sleep(_PAUSE_S)
                if time.monotonic() - looked > _LOOK_S:
                    looked = time.monotonic()
                    self._check()
