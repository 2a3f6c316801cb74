"""The host tiles of a model by name, with their parts, FP32 sums and the snapshot that is being saved."""
from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from megacompile.errors import InsufficientMemoryError
from megacompile.runtime.memory.divided import Division, collect, give_back, hand_out, memory_of
from megacompile.runtime.memory.shards import Share, TilePart, TileShard
from megacompile.runtime.memory.snapshot import Snapshot
from megacompile.runtime.memory.state_file import StateFile
from megacompile.runtime.memory.tiles import HostTile, TileLayout, TileMemory, weights_piece
from megacompile.runtime.optimizer import native
from megacompile.runtime.ranks import Ranks
from megacompile.sizes import format_bytes
from megacompile.system.host_memory import PAGE, available_host_bytes, host_memory
from megacompile.system.linux import yield_to_others

# -------------------- Takes the pages of optimizer state before the first update needs them, beside tracing and compiling
#
# The system zeroes a page when it is first written. The first update of a 7B model would wait for 60 GiB of pages, and longer
# where several ranks share memory, whose pages are small.
#: Bytes that a thread takes before it looks whether it should stop.
_CHUNK = 1 << 26
#: State that is smaller is not worth a thread.
LEAST_BYTES = 1 << 30
_MOST_THREADS = 8


class FirstTouch:
    """Takes pages of memory in the background. State: the memory that is left, and the threads that take it."""

    def __init__(self) -> None:
        self._left: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._stopped = False

    def begin(self, parts: Iterable[Tensor]) -> None:
        """Begins with these parts of host memory, if enough is available. Values that are written meanwhile stay."""
        chunks = [chunk for part in parts for chunk in part.view(torch.uint8).split(_CHUNK) if chunk.numel()]
        if sum(chunk.numel() for chunk in chunks) < LEAST_BYTES or (library := native.library()) is None:
            return
        for chunk in chunks:
            self._left.put(chunk)
        threads = [threading.Thread(target=self._work, args=(library,), daemon=True, name="megacompile first touch")
                   for _ in range(max(1, min(_MOST_THREADS, native.default_threads() // 2)))]
        self._threads += threads
        for thread in threads:
            thread.start()

    def _work(self, library: ctypes.CDLL) -> None:
        yield_to_others()
        while not self._stopped:
            try:
                chunk = self._left.get_nowait()
            except queue.Empty:
                return
            library.megacompile_touch(chunk.data_ptr(), chunk.numel(), PAGE)

    def stop(self) -> None:
        """Ends the threads. On return they use no memory."""
        self._stopped = True
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._left = queue.SimpleQueue()


#: Parts of tiles: the master weights, and all that training changes.
WEIGHTS = ("weights", "remainder")
STATE = (*WEIGHTS, "moments")
T = TypeVar("T")


# -------------------- Memory of tiles that ranks share
class SharedTileMemory(TileMemory):
    """Memory that all ranks of a host map. The model's values are rank 0's, as with `DistributedDataParallel`, so other copies
    come from the first. A copy that is divided among hosts (`divided.py`) writes what it reads from files on each of them.
    Raises `RankError` if the ranks' models differ."""

    def __init__(self, layouts: Collection[TileLayout], ranks: Ranks, division: Division | None = None) -> None:
        self._ranks, self.division = ranks, division
        self.writes = ranks.rank == 0
        ranks.agree_on("stream", "model", [repr(layout) for layout in layouts])
        pieces = {name: size for layout in layouts for name, size in layout.shared_pieces().items()}
        weights = {weights_piece(layout.name) for layout in layouts}
        # Apart, since weights stay with the model when it is closed, and a file's pages are freed together.
        self._weights = ranks.shared_memory({name: size for name, size in pieces.items() if name in weights})
        self._training = ranks.shared_memory({name: size for name, size in pieces.items() if name not in weights})

    def allocate(self, layout: TileLayout) -> HostTile:
        tile = HostTile.allocate(layout, self._training, self._weights.piece(weights_piece(layout.name)))
        tile.here = None if self.division is None else self.division.own(layout.name)
        return tile

    def written(self, tile: HostTile, names: Collection[str] | None = None) -> None:
        if self.division is None or not self._ranks.hosts.leads:
            return
        if self._ranks.hosts.copy == 0:
            hand_out(tile, WEIGHTS, self.division, self._ranks, names)
        give_back(tile, WEIGHTS, self.division)

    def share(self, work: Collection[T]) -> list[T]:
        hosts = self._ranks.hosts
        return list(work)[hosts.seat::len(hosts.here)] if hosts.copy == 0 else []


@dataclass
class Store:
    """All tiles of a streamed model, in the order of the model's calls, the `parts` of tiles that are streamed separately, and
    with several ranks on a host this rank's `shards` of both. `shared`: other ranks train the same tiles, or copies of them on
    other hosts. Call `preserve` before changing state that a checkpoint holds, since a `snapshot` may not be fully written yet.
    `files`: those with moments. `division`: where tiles are, if hosts divide them. `_own`: while all ranks load the same
    values, the tiles that this process writes. `_read`, `_written`: bytes of files that had moments."""

    tiles: dict[str, HostTile] = field(default_factory=dict)
    parts: dict[str, TilePart] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    shards: dict[str, TileShard] = field(default_factory=dict)
    first_touch: FirstTouch = field(default_factory=FirstTouch)
    shared: bool = False
    files: list[StateFile] = field(default_factory=list)
    division: Division | None = None
    _own: frozenset[str] | None = None
    _read: int = 0
    _written: int = 0

    def __getitem__(self, name: str) -> Share:
        """The share of a streamed tile, or part of a tile, that this rank copies and updates."""
        return self.shards[name] if name in self.shards else self.whole(name)

    def whole(self, name: str) -> HostTile | TilePart:
        """The streamed tile, or part of a tile, of this name."""
        return self.parts[name] if name in self.parts else self.tiles[name]

    def divide(self, names: Iterable[str], rank: int, ranks: int, division: Division | None = None) -> None:
        """Makes this process copy and update only the shards of one of the `ranks` of its copy. Other ranks train the same
        tiles."""
        self.shared, self.division = True, division
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
        """Gives tiles and their streamed parts these layouts, which differ from the current ones only in the optimizer's state.
        `on_disk`: the tiles whose moments are on disk. `file` holds those that it was made for; others stay where they are.
        State whose form or place changes restarts. Returns memory that can be freed now."""
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
        """True if this process writes the loaded values of a tile."""
        return self._own is None or tile in self._own

    # ---------------------------------------------------------------- tiles that hosts divide
    @contextlib.contextmanager
    def whole_on_every_host(self, name: str, parts: Collection[str], ranks: Ranks | None, doing: str) -> Iterator[HostTile]:
        """A context in which parts of a tile may be read as a whole. If hosts divide the tile, all ranks enter and leave
        together, while no rank updates it. Raises `RankError`."""
        tile = self.tiles[name]
        if self.division is None or ranks is None:
            yield tile
            return
        ranks.agree(doing)
        if ranks.hosts.leads:
            collect(tile, parts, self.division, ranks)
        ranks.agree(doing)
        try:
            yield tile
        finally:
            ranks.agree(doing)  # no rank of this host reads it any more
            if ranks.hosts.leads:
                give_back(tile, parts, self.division)

    # ---------------------------------------------------------------- memory
    def streamed_memory(self) -> Iterator[Tensor]:
        """The host memory that copies over the link read and write."""
        for tile in self.tiles.values():
            if tile.here is None:
                yield from (part for part in (tile.weights, tile.gradients) if part is not None)
            else:  # pages of other hosts' shards would be taken
                yield from memory_of(tile, ("weights", "gradients"), tile.here)
        parts: list[TilePart | TileShard] = [*self.parts.values(), *self.shards.values()]
        yield from (part.norm_bytes for part in parts if part.norm_bytes is not None)

    def touch_state(self, tiles: Collection[str]) -> None:
        """Begins to take the pages of this process's share of these tiles' optimizer state, in the background."""
        every: Iterable[Share] = self.shards.values() if self.shards else self.tiles.values()
        self.first_touch.begin(part for share in every if share.home.layout.name in tiles for part in _state_of(share))

    def hold_gradients(self) -> list[Tensor]:
        """Allocates the gradients of all trained tiles, unless they exist. Returns what was allocated. Raises
        `InsufficientMemoryError`; then nothing has changed."""
        missing = [tile for tile in self.tiles.values() if tile.layout.trainable and tile.gradients is None]
        needed = self._on_this_host(sum(tile.layout.gradient_bytes for tile in missing))
        if needed and needed > (available := available_host_bytes()):
            raise InsufficientMemoryError(
                f"gradients that wait for a step take {format_bytes(needed)} of host memory, and {format_bytes(available)} are "
                "available: update on arrival (update='arrival'), or use a machine with more memory")
        for tile in missing:
            tile.allocate_gradients()
        return [tile.gradients for tile in missing if tile.gradients is not None]

    def allocate_sums(self, tiles: Iterable[str]) -> None:
        """Allocates FP32 sums of gradients for tiles without them. Raises `InsufficientMemoryError`; then nothing has
        changed."""
        homes = {name: self[name].home for name in tiles}
        missing = [tile for tile in {id(each): each for each in homes.values()}.values()
                   if tile.sums is None and tile.layout.trainable]
        needed = self._on_this_host(sum(tile.layout.sum_bytes for tile in missing))
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
        """True if an optimizer has made state."""
        return any(tile.has_moments for tile in self.tiles.values())

    def available_bytes(self, budget: int | None = None) -> int:
        """Bytes of host memory for training: available bytes plus those that tiles already take, at most `budget`."""
        parts = self.bytes()
        kept = sum(part.nbytes for tile in self.tiles.values() if tile.moments_written for part in tile.state())
        there = available_host_bytes() + parts.get("weights", 0) + parts.get("gradients", 0) + self._on_this_host(kept)
        return min(there, budget or there)

    def drop_sums(self) -> None:
        """Frees the sums."""
        for tile in self.tiles.values():
            tile.sums = None

    def release(self) -> None:
        """Drops all memory and files. Objects that still refer to this store, such as graphs of losses, handles and tracebacks,
        keep none alive. Tensors that users have over tiles keep their memory. Nothing may use tiles any more."""
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
        """Bytes of this host's memory for each part of the tiles."""
        total: Counter[str] = Counter()
        for tile in self.tiles.values():
            total.update(tile.parts())
        return {part: self._on_this_host(size) for part, size in total.items()}

    def _on_this_host(self, size: int) -> int:
        """The share of so many bytes of tiles that this host has memory for."""
        return size if self.division is None else -(-size // len(self.division.hosts))


def _state_of(share: Share) -> Iterator[Tensor]:
    """Memory of the optimizer state that a process updates, as bytes."""
    home = replace(share.home, moments=share.home.prepare_moments())
    return memory_of(home, ("moments", "remainder"), tuple(there for _, there in share.runs))


# -------------------- The copies of a model: made equal to the first one
def copy_from_first_host(store: Store, ranks: Ranks, parts: Collection[str], tiles: Collection[str] | None = None) -> None:
    """Copies parts of tiles (None: of all tiles) from the first copy to all others, if there are any. All ranks call this while
    no rank uses the tiles. Each sends or receives its shard. Raises `RankError`."""
    if ranks.hosts.copies == 1:
        return
    for name, tile in store.tiles.items():
        if tiles is not None and name not in tiles:
            continue
        if store.division is not None:
            for memory in memory_of(tile, parts, store.division.shards[name][ranks.hosts.local]):
                ranks.send_to_all_hosts(memory)
            continue
        for memory in tile.memories(parts):
            ranks.send_to_all_hosts(memory.view(torch.uint8).tensor_split(ranks.hosts.ranks)[ranks.hosts.local])
        if tile.file is not None and "moments" in parts:
            slab = host_memory(tile.layout.disk_bytes)
            if ranks.hosts.copy == 0:
                tile.file.read(name, slab)
            ranks.send_to_all_hosts(slab)
            if ranks.hosts.copy > 0:
                tile.file.write(name, slab)
