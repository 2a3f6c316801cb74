"""The state of all tiles at one moment, which a writer reads while training continues.

Code that is about to change a tile calls `preserve` first. A tile that the writer has not finished is copied if there is room
for the copy. Otherwise the caller waits until the tile is read, or another tile's copy is freed. So tiles that the writer
reads in time are never copied, and a slow disk delays training only if memory is short too.
"""
from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megacompile.errors import InsufficientMemoryError
from megacompile.runtime.memory.divided import memory_of, parts_of_run, within
from megacompile.runtime.memory.state_layout import scale_of
from megacompile.runtime.memory.tiles import HostTile, ParameterSlice
from megacompile.runtime.optimizer import host_update as host
from megacompile.system.host_memory import host_memory

_STATE = ("weights", "remainder", "moments")


@dataclass(frozen=True)
class Piece:
    """One parameter's share of one part of a tile. `name`: weight, remainder, or a name in an optimizer's state. `shape`: of
    the tensor in a checkpoint. `run`: the elements of the parameter that it has, if hosts divide the tile; None: all."""

    name: str
    position: int
    parameter: ParameterSlice
    dtype: torch.dtype
    shape: tuple[int, ...]
    run: tuple[int, int] | None = None

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    def read(self, tile: HostTile, start: int, into: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
        """Copies bytes of the piece, from `start`, to the beginning of `into`. Returns how many. Raises `DiskError`."""
        count = min(len(into), self.bytes - start)
        if tile.file is not None and self.name not in ("weight", "remainder"):
            tile.file.get(tile.layout.name, self.position, self.name, start, torch.from_numpy(into[:count]))
        else:  # releases the interpreter lock, and uses this thread only
            np.copyto(into[:count], self.memory(tile).numpy()[start:start + count])
        return count

    def memory(self, tile: HostTile) -> Tensor:
        """uint8 [bytes]; not for moments on disk."""
        size = self.bytes
        if self.run is not None:
            return dict(parts_of_run(tile, self.position, *self.run))[self.name].view(torch.uint8)
        if self.name in ("weight", "remainder"):
            part = tile.weights if self.name == "weight" else tile.remainder
            assert part is not None, f"{tile.layout.name} has no {self.name}"
            start = self.parameter.start * self.dtype.itemsize
            return part.view(torch.uint8)[start:start + size]
        named = dict(tile.layout.state_layout.named(tile.moments, self.position))
        return named[self.name].view(torch.uint8)[:size]


def pieces(tile: HostTile) -> list[Piece]:
    """All parts of a tile that training needs to resume, without gradients."""
    layout, found = tile.layout, []
    if tile.here is not None:
        return [Piece(part, position, s, memory.dtype, (memory.numel(),), run)
                for position, s in enumerate(layout.slices) for run in within(tile.here, s.start, s.stop)
                for part, memory in parts_of_run(tile, position, *run)]
    for position, s in enumerate(layout.slices):
        found.append(Piece("weight", position, s, layout.dtype, s.shape))
        if not s.trainable:
            continue
        if tile.remainder is not None:
            found.append(Piece("remainder", position, s, torch.int16, s.shape))
        state = layout.state_of(position)
        for moment in state.moments if tile.has_moments else ():
            found.append(Piece(moment, position, s, state.format.dtype, s.shape))
            if state.format.scaled:
                found.append(Piece(scale_of(moment), position, s, torch.float32, (state.format.scales(s.count),)))
    return found


def state_bytes(tile: HostTile) -> int:
    """Bytes of a tile's weights and optimizer state, on disk too."""
    if tile.here is not None:
        return sum(map(len, memory_of(tile, _STATE, tile.here)))
    on_disk = sum(tile.layout.moment_bytes) if tile.begun else 0
    return tile.weights.nbytes + sum(part.nbytes for part in tile.state()) + on_disk


def _copy(tile: HostTile) -> HostTile:
    """A copy of a tile's state in memory, without gradients. Raises `InsufficientMemoryError`, `DiskError`."""

    def copied(memory: Tensor) -> Tensor:
        aside = host_memory(memory.nbytes)
        if tile.here is None:
            host.copy(aside, memory.view(torch.uint8))
        return aside.view(memory.dtype)

    copy = HostTile(tile.layout, copied(tile.weights), None, None if tile.remainder is None else copied(tile.remainder),
                    tile.file.copy(tile.layout.name) if tile.file is not None and tile.begun
                    else [copied(moment) for moment in tile.moments], here=tile.here)
    for aside, memory in zip(memory_of(copy, _STATE, tile.here), memory_of(tile, _STATE, tile.here),
                             strict=True) if tile.here is not None else ():
        host.copy(aside, memory)  # pages that other hosts have stay untouched
    return copy


class TouchedError(Exception):
    """A tile was changed without a call of `preserve`."""


class Snapshot:
    """State, under one lock: the source of each unfinished tile (`_sources`: the tile itself, or its copy), the bytes that
    copies may still take, how many callers wait in `preserve`, and which tiles that other ranks write were not checked yet
    (`_of_others`). `tiles`: those that the writer of this process writes. `stamp(name)` changes when a tile is written from
    outside, without `preserve`. With several ranks, `of_ranks` says which tiles their writers have read."""

    def __init__(self, tiles: Mapping[str, HostTile], copy_bytes: int, stamp: Callable[[str], object],
                 of_ranks: ReadTiles | None = None) -> None:
        self._tiles, self._sources = dict(tiles), dict(tiles)
        self._room, self._waiting = copy_bytes, 0
        self._of_ranks = of_ranks
        self._of_others = set() if of_ranks is None else set(of_ranks.tiles) - self._tiles.keys()
        self._stamp, self._stamps = stamp, {name: stamp(name) for name in (*tiles, *self._of_others)}
        self._changed = threading.Condition()
        self.touched: str | None = None

    # ---------------------------------------------------------------- for code that changes tiles
    def preserve(self, name: str) -> None:
        """Returns once the tile may change. Raises `RankError` if the rank whose writer must read it has ended."""
        if name not in self._tiles:  # another rank writes it
            if self._of_ranks is not None:
                self._of_ranks.wait(name)
                with self._changed:
                    self._check_of_others(name)
            return
        while (size := self._claim(name)) is not None:
            try:
                copy = _copy(self._tiles[name])
            except InsufficientMemoryError:
                self._room_for_none()
                continue
            except BaseException:  # the drive, or Ctrl-C
                with self._changed:
                    self._room += size
                    self._changed.notify_all()
                raise
            with self._changed:
                if self._sources.get(name) is self._tiles[name]:
                    self._sources[name] = copy
                    self._check(name)
                    self._mark(name)
                else:  # the writer has finished it meanwhile
                    self._room += size
                    self._changed.notify_all()
            return

    def _claim(self, name: str) -> int | None:
        """Reserves room for a tile's copy, and waits for it if necessary. Returns the bytes; None if the tile needs no copy."""
        with self._changed:
            size = state_bytes(self._tiles[name])
            if not (self._free(name) or size <= self._room):
                self._waiting += 1
                self._changed.notify_all()
                try:
                    self._changed.wait_for(lambda: self._free(name) or size <= self._room)
                finally:
                    self._waiting -= 1
            if self._free(name):
                return None
            self._room -= size
            return size

    def _free(self, name: str) -> bool:
        return self._sources.get(name) is not self._tiles[name]

    def _mark(self, *names: str) -> None:
        """Tells other ranks that they may change these tiles."""
        if self._of_ranks is not None:
            self._of_ranks.mark(*names)

    def _room_for_none(self) -> None:
        """Makes callers of `preserve` wait from now on, since the system has no memory for copies."""
        with self._changed:
            self._room = -(1 << 62)

    # ---------------------------------------------------------------- for the writer
    def read(self, name: str, piece: Piece, start: int, into: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
        """Copies bytes of a piece, from `start`, to the beginning of `into`. Returns how many; 0 once the snapshot is
        abandoned. Raises `DiskError`."""
        with self._changed:
            if name not in self._sources:
                return 0
            return piece.read(self._sources[name], start, into)

    def finish(self, name: str) -> None:
        """Called when the writer has read all of a tile. Raises `TouchedError` if a tile was changed without `preserve`."""
        with self._changed:
            source = self._sources.get(name)
            if source is self._tiles[name]:
                self._check(name)
            if self._sources.pop(name, None) is not None and source is not self._tiles[name]:
                self._room += state_bytes(self._tiles[name])
            self._mark(name)
            self._changed.notify_all()
            if self.touched is not None:
                raise TouchedError(self.touched)

    def _check(self, name: str) -> None:
        if self._stamp(name) != self._stamps[name]:
            self.touched = name

    def _check_of_others(self, *names: str) -> None:
        for name in self._of_others.intersection(names):
            self._of_others.remove(name)
            self._check(name)

    def check_of_others(self) -> None:
        """Called when all ranks have read their tiles. Raises `TouchedError` if this process has changed one without
        `preserve`. Only this process can see that."""
        with self._changed:
            self._check_of_others(*self._of_others)
            if self.touched is not None:
                raise TouchedError(self.touched)

    def abandon(self) -> None:
        """Called when the writer stops. All tiles may change."""
        with self._changed:
            self._sources.clear()
            self._mark(*self._tiles)
            self._changed.notify_all()

    def pause(self, seconds: float) -> None:
        """Waits for `seconds`, or until a caller waits in `preserve`."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting > 0, timeout=seconds)

    def wait(self) -> None:
        """Waits until every tile is read, on all ranks. Raises `RankError`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._sources)
        if self._of_ranks is not None:
            self._of_ranks.wait()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tiles)


# -------------------- Which tiles of a snapshot the writers of all ranks have read or copied
#
# Each tile of a checkpoint is written by one rank, and each rank updates a shard of every tile. So before its update, a rank
# also waits for the writers of others. A writer's own rank runs the same update, which makes it copy the tile: nobody waits
# long.
#: Seconds between two looks of a wait at the tile, and at the other ranks.
_PAUSE_S, _LOOK_S = 5e-4, 0.05


class ReadTiles:
    """`memory`: uint8 [tiles], zeros, shared by all ranks: 1 if a tile may change. `tiles`: all, in the same order on every
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
