"""The host tiles of a model by name, with their parts, FP32 sums and the snapshot that is being saved."""
from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from megacompile.errors import InsufficientMemoryError
from megacompile.runtime.memory.first_touch import FirstTouch
from megacompile.runtime.memory.shards import Share, TileShard
from megacompile.runtime.memory.snapshot import Snapshot
from megacompile.runtime.memory.state_file import StateFile
from megacompile.runtime.memory.tile_part import TilePart
from megacompile.runtime.memory.tiles import HostTile, TileLayout
from megacompile.sizes import format_bytes
from megacompile.system.host_memory import available_host_bytes


@dataclass
class Store:
    """All tiles of a streamed model, in the order of the model's calls, `parts` of tiles that are streamed separately, and with
    several ranks on a host this rank's `shards` of both. `shared`: whether other ranks train the same tiles, or copies of them
    on other hosts. Call `preserve` before changing state that a checkpoint holds: a `snapshot` may
    not be fully written yet. `files`: those that moments are in. `_own`: while all ranks load the same values, the
    tiles that this process writes. `_read`, `_written`: bytes of files that moments were in."""

    tiles: dict[str, HostTile] = field(default_factory=dict)
    parts: dict[str, TilePart] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    shards: dict[str, TileShard] = field(default_factory=dict)
    first_touch: FirstTouch = field(default_factory=FirstTouch)
    shared: bool = False
    files: list[StateFile] = field(default_factory=list)
    _own: frozenset[str] | None = None
    _read: int = 0
    _written: int = 0

    def __getitem__(self, name: str) -> Share:
        """What this rank copies and updates of the tile, or part of a tile, that is streamed under a name."""
        return self.shards[name] if name in self.shards else self.whole(name)

    def whole(self, name: str) -> HostTile | TilePart:
        """The tile, or part of a tile, that is streamed under a name."""
        return self.parts[name] if name in self.parts else self.tiles[name]

    def divide(self, names: Iterable[str], rank: int, ranks: int) -> None:
        """From now on other ranks train the same tiles, and this process copies and updates only the shards of one of the
        `ranks` of its host."""
        self.shared = True
        if ranks > 1:
            self.shards = {name: TileShard.of(self.whole(name), rank) for name in names}

    @property
    def disk_bytes_read(self) -> int:
        """Bytes of moments that this process's updates have read from files so far."""
        return self._read + sum(file.file.bytes_read for file in self.files)

    @property
    def disk_bytes_written(self) -> int:
        """Bytes of moments that this process's updates have written to files so far."""
        return self._written + sum(file.file.bytes_written for file in self.files)

    def keep(self, host: Mapping[str, TileLayout], streamed: Mapping[str, TileLayout], on_disk: Collection[str] = (),
             file: StateFile | None = None) -> list[Tensor]:
        """From now on tiles and what is streamed of them have these layouts, which differ from those of before in the
        optimizer's state alone. `on_disk`: the tiles whose moments are on disk: in `file` those that it was made for, others
        where they are. State that is kept in another way, or elsewhere, restarts. Returns memory that can be freed now."""
        if file is not None:
            self.files.append(file)
        unused = []
        for name, layout in host.items():
            there = None if name not in on_disk else file if file is not None and name in file else self.tiles[name].file
            unused += self.tiles[name].keep(layout, there)
        for old in list(self.files):
            if not any(tile.file is old for tile in self.tiles.values()):
                self._read += old.file.bytes_read
                self._written += old.file.bytes_written
                old.stop_threads()
                self.files.remove(old)  # it is closed once nobody has a state in it
        for name, part in self.parts.items():
            part.layout = streamed[name]
        for name, shard in self.shards.items():
            shard.layout = replace(shard.layout, states=streamed[name].states)
        return unused

    # ---------------------------------------------------------------- loading values that all ranks have
    @property
    def loading(self) -> bool:
        return self._own is not None

    @contextlib.contextmanager
    def load(self, own: Collection[str]) -> Iterator[None]:
        """A context in which all ranks load the same values, and this process writes only some tiles."""
        self._own = frozenset(own)
        try:
            yield
        finally:
            self._own = None

    def writes(self, tile: str) -> bool:
        """Whether this process writes the values that are loaded into a tile."""
        return self._own is None or tile in self._own

    # ---------------------------------------------------------------- memory
    def streamed_memory(self) -> Iterator[Tensor]:
        """The host memory that copies over the link read and write."""
        for tile in self.tiles.values():
            yield from (part for part in (tile.weights, tile.gradients) if part is not None)
        parts: list[TilePart | TileShard] = [*self.parts.values(), *self.shards.values()]
        yield from (part.norm_bytes for part in parts if part.norm_bytes is not None)

    def touch_state(self, tiles: Collection[str]) -> None:
        """Begins to take the pages of this process's share of these tiles' optimizer state, in the background."""
        every: Iterable[Share] = self.shards.values() if self.shards else self.tiles.values()
        self.first_touch.begin(part for share in every if share.home.layout.name in tiles for part in _state_of(share))

    def hold_gradients(self) -> list[Tensor]:
        """Allocates the gradients of all trained tiles, unless they are there. Returns what was allocated. Raises
        `InsufficientMemoryError`; then nothing has changed."""
        missing = [tile for tile in self.tiles.values() if tile.layout.trainable and tile.gradients is None]
        needed = sum(tile.layout.gradient_bytes for tile in missing)
        if needed and needed > (available := available_host_bytes()):
            raise InsufficientMemoryError(
                f"gradients that wait for a step take {format_bytes(needed)} of host memory, and {format_bytes(available)} are "
                "available: update on arrival (overlap='backward'), or use a machine with more memory")
        for tile in missing:
            tile.allocate_gradients()
        return [tile.gradients for tile in missing if tile.gradients is not None]

    def allocate_sums(self, tiles: Iterable[str]) -> None:
        """Allocates FP32 sums of gradients for those of these tiles that have none. Raises `InsufficientMemoryError`; then
        nothing has changed."""
        homes = {name: self[name].home for name in tiles}
        missing = [tile for tile in {id(each): each for each in homes.values()}.values()
                   if tile.sums is None and tile.layout.trainable]
        needed = sum(tile.layout.sum_bytes for tile in missing)
        if needed and needed > (available := available_host_bytes()):
            raise InsufficientMemoryError(
                f"sums of gradients over waves take {format_bytes(needed)} of host memory, and {format_bytes(available)} are "
                "available: use one wave (waves=1), or a machine with more memory")
        for tile in missing:
            tile.allocate_sums()

    def lend_moments(self) -> None:
        """Call this before the user gets the moments."""
        for tile in self.tiles.values():
            tile.moments_lent |= bool(tile.moments)

    @property
    def has_moments(self) -> bool:
        """Whether an optimizer has made state."""
        return any(tile.has_moments for tile in self.tiles.values())

    def available_bytes(self, budget: int | None = None) -> int:
        """Bytes of host memory for training: available bytes plus those that tiles take already; at most `budget`."""
        parts = self.bytes()
        kept = sum(part.nbytes for tile in self.tiles.values() if tile.moments_written for part in tile.state())
        there = available_host_bytes() + parts.get("weights", 0) + parts.get("gradients", 0) + kept
        return min(there, budget or there)

    def drop_sums(self) -> None:
        """Frees the sums."""
        for tile in self.tiles.values():
            tile.sums = None

    def release(self) -> None:
        """Holds no memory and no file from now on, and neither does what still refers to this store: graphs of losses, handles,
        tracebacks. Tensors that users have over tiles keep their memory. Nothing may use tiles any more."""
        self._read, self._written = self.disk_bytes_read, self.disk_bytes_written
        self.files.clear()
        for tile in self.tiles.values():
            tile.release()
        for part in (*self.parts.values(), *self.shards.values()):
            part.norm_bytes = None

    def preserve(self, *names: str) -> None:
        """Returns once these tiles (all, if none is named) may change. May wait for a checkpoint's writer."""
        if (snapshot := self.snapshot) is not None:  # the writer removes it when it is done
            for name in names or self.tiles:
                snapshot.preserve(self[name].home.layout.name)

    def bytes(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for tile in self.tiles.values():
            for part, size in tile.parts().items():
                total[part] = total.get(part, 0) + size
        return total


def _state_of(share: Share) -> Iterator[Tensor]:
    """Memory of the optimizer state that a process updates: moments are bytes, of some number for each element."""
    home = share.home
    for part in (*home.prepare_moments(), *([] if home.remainder is None else [home.remainder])):
        for _, there in share.runs:
            start, stop = (part.numel() * end // home.layout.elements for end in (there.start, there.stop))
            yield part[start:stop]
