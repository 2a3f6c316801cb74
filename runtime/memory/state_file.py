"""Moments of tiles on disk: each rank has a file with its own share of each tile, in which the moments lie as in a slot.

    file of rank 0    its shard of layers.3 | of layers.7
    file of rank 1    its shard of layers.3 | of layers.7
    slab              this rank's shard of layers.3         while the tile is updated

Updates read and write this rank's file (`read`, `write`). What users read and load, and what checkpoints hold, is a parameter's
moment, which may be in the files of all ranks (`get`, `put`); no update may run meanwhile. Nothing is mapped, so a drive that
fails raises `DiskError` in either case.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from megacompile.errors import DiskError
from megacompile.runtime.memory.shards import ShardLayout
from megacompile.runtime.memory.tiles import TileLayout
from megacompile.system.direct_file import Address, DirectFile
from megacompile.system.host_memory import host_memory


class StateFile:
    """`layouts`: of host tiles. `file`: of this process. `files`: of all ranks of the host, in rank order. Raises `DiskError`
    as `DirectFile` does, before anything has changed."""

    def __init__(self, folder: Path, layouts: Iterable[TileLayout]) -> None:
        self._layouts = {layout.name: layout for layout in layouts}
        self._parts: dict[str, tuple[int, list[TileLayout]]] = {}
        size = 0
        for layout in self._layouts.values():
            ranks = range(layout.ranks)
            shards: list[TileLayout] = [ShardLayout.of_rank(layout, rank) for rank in ranks] if len(ranks) > 1 else [layout]
            assert all(sum(shard.moment_bytes) <= layout.disk_bytes for shard in shards), f"{layout.name} has no room"
            self._parts[layout.name] = size, shards
            size += layout.disk_bytes
        self.file = DirectFile(folder, size)
        self.files: Sequence[DirectFile] = (self.file,)

    def share(self, addresses: Sequence[Address], rank: int) -> Self:
        """Opens the files of the other ranks of this host. Raises `RankError`."""
        self.files = tuple(self.file if other == rank else DirectFile.of(self.file.folder, address)
                           for other, address in enumerate(addresses))
        return self

    def __contains__(self, tile: str) -> bool:
        return tile in self._parts

    @property
    def bytes(self) -> int:
        """Bytes of this process's file; 0 once it is closed."""
        return 0 if self.file.closed else self.file.size

    def stop_threads(self) -> None:
        """Ends the threads that read and write. Values can still be read."""
        for file in self.files:
            file.stop_threads()

    def close(self) -> None:
        """Closes all files."""
        for file in self.files:
            file.close()

    # ---------------------------------------------------------------- for updates: this rank's share
    def read(self, tile: str, slab: Tensor) -> None:
        """Fills a slab, uint8 [disk_bytes], with this rank's moments of a tile. Raises `DiskError`."""
        try:
            self.file.read(slab, self._parts[tile][0])
        except OSError as error:
            raise self._failed("reading", "from", tile, error, self._remedy()) from error

    def write(self, tile: str, slab: Tensor) -> None:
        """Writes this rank's moments of a tile from a slab. Raises `DiskError`. Then the file may have only a part of them."""
        try:
            self.file.write(slab, self._parts[tile][0])
        except OSError as error:
            raise self._failed("writing", "to", tile, error, self._remedy()) from error

    # ---------------------------------------------------------------- for all else: a parameter's, of all ranks
    def get(self, tile: str, position: int, name: str, start: int, into: Tensor) -> None:
        """Fills `into`, uint8 [n], with a parameter's stored tensor of this name, such as `exp_avg`, from byte `start` on.
        Raises `DiskError`."""
        try:
            for file, at, part in self._pieces(tile, position, name, start, into):
                file.read_bytes(part, at)
        except OSError as error:
            raise self._failed("reading", "from", tile, error, "try again, or load a checkpoint") from error

    def put(self, tile: str, position: int, name: str, values: Tensor) -> None:
        """Replaces a parameter's stored tensor of this name by `values`, uint8 [n]. Raises `DiskError`. Then only a part may be
        replaced."""
        try:
            for file, at, part in self._pieces(tile, position, name, 0, values):
                file.write_bytes(part, at)
        except OSError as error:
            raise self._failed("writing", "to", tile, error, "load a checkpoint") from error

    def copy(self, tile: str) -> list[Tensor]:
        """The moments of a tile in the layout of memory: one buffer for each, uint8. Raises `DiskError`,
        `InsufficientMemoryError`."""
        layout = self._layouts[tile]
        buffers = [host_memory(size) for size in layout.moment_bytes]
        for position, s in enumerate(layout.slices):
            for name, (moment, first, size) in layout.state_layout.spans(position, s.count).items():
                self.get(tile, position, name, 0, buffers[moment][first:first + size])
        return buffers

    def _pieces(self, tile: str, position: int, name: str, start: int, memory: Tensor) -> Iterator[
            tuple[DirectFile, int, Tensor]]:
        """(file, first byte there, part of `memory`) for each rank that has a part of these bytes."""
        begin, shards = self._parts[tile]
        assert memory.dtype == torch.uint8, "bytes"
        before, stop = 0, start + memory.numel()
        for file, shard in zip(self.files, shards, strict=True):
            buffers = [sum(shard.moment_bytes[:moment]) for moment in range(len(shard.moment_bytes))]
            moment, first, size = shard.state_layout.spans(position, shard.slices[position].count)[name]
            low, high = max(start, before), min(stop, before + size)
            if low < high:
                yield file, begin + buffers[moment] + first + low - before, memory[low - start:high - start]
            before += size

    # ---------------------------------------------------------------- failing
    def _remedy(self) -> str:
        if len(self.files) > 1:
            return "start the job again from the last checkpoint"
        return "call optimizer.step() again, which completes the step, or load a checkpoint"

    def _failed(self, doing: str, way: str, tile: str, error: OSError, remedy: str) -> DiskError:
        return DiskError(f"{doing} the optimizer state of {tile} {way} {self.file.folder} failed ({error.strerror}): check "
                         f"the drive and {remedy}")
