"""What a host tile knows of the file that its moments are in (`state_file.py`)."""
from __future__ import annotations

from typing import Protocol

from torch import Tensor


class MomentFile(Protocol):
    """Its methods raise `DiskError` if the drive fails."""

    def read(self, tile: str, slab: Tensor) -> None:
        """Fills a slab, uint8 [disk_bytes], with this rank's moments of a tile."""

    def write(self, tile: str, slab: Tensor) -> None:
        """Writes this rank's moments of a tile from a slab."""

    def get(self, tile: str, position: int, name: str, start: int, into: Tensor) -> None:
        """Fills `into`, uint8 [n], with what is kept of a parameter under a name, from byte `start` on."""

    def put(self, tile: str, position: int, name: str, values: Tensor) -> None:
        """Replaces what is kept of a parameter under a name by `values`, uint8 [n]."""

    def copy(self, tile: str) -> list[Tensor]:
        """The moments of a tile as memory has them: a buffer for each, uint8."""
