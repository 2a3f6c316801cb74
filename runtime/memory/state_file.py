"""Moments of tiles in a file: one run of whole blocks for each tile, in which the moments lie as in a slot.

    file     moments of layers.3 | moments of layers.7
    slab     moments of layers.3                            while the tile is updated

`moments` gives the same bytes as memory, for everything that is not an update: states that users read and load, checkpoints.
The system reads them from the disk when they are touched, and takes their pages back when memory is short. The lanes must be
idle, and `HostTile.file` of the tile this file, as for other parts of a tile.
"""
from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from megacompile.errors import DiskError
from megacompile.runtime.memory.tiles import TileLayout
from megacompile.system.direct_file import DirectFile


class StateFile:
    """Raises `DiskError` as `DirectFile` does, before anything has changed."""

    def __init__(self, folder: Path, layouts: Iterable[TileLayout]) -> None:
        self._parts: dict[str, tuple[TileLayout, int]] = {}
        size = 0
        for layout in layouts:
            self._parts[layout.name] = layout, size
            size += layout.disk_bytes
        self.file = DirectFile(folder, size)

    def __contains__(self, tile: str) -> bool:
        return tile in self._parts

    @property
    def bytes(self) -> int:
        """Those that it takes on the disk; 0 once it is closed."""
        return 0 if self.file.closed else self.file.size

    def close(self) -> None:
        """As `DirectFile.close`."""
        self.file.close()

    def moments(self, tile: str) -> list[Tensor]:
        """The tile's moments as memory: one buffer each, uint8."""
        layout, start = self._parts[tile]
        return layout.moments(self.file.mapped[start:start + layout.disk_bytes])

    def read(self, tile: str, slab: Tensor) -> None:
        """Fills a slab, uint8 [disk_bytes], with the moments of a tile. Raises `DiskError`."""
        try:
            self.file.read(slab, self._parts[tile][1])
        except OSError as error:
            raise self._failed("reading", "from", tile, error) from error

    def write(self, tile: str, slab: Tensor) -> None:
        """Writes the moments of a tile from a slab. Raises `DiskError`; then the file may have a part of them."""
        try:
            self.file.write(slab, self._parts[tile][1])
        except OSError as error:
            raise self._failed("writing", "to", tile, error) from error

    def _failed(self, doing: str, way: str, tile: str, error: OSError) -> DiskError:
        return DiskError(f"{doing} the optimizer state of {tile} {way} {self.file.folder} failed ({error.strerror}): see to "
                         "the drive and call optimizer.step() again, which completes the step, or load a checkpoint")
