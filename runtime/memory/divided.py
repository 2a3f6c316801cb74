"""A copy of the model that is divided among hosts: each host has memory for the shards of its own ranks.

    tile in the address space of every host      shard 0 | shard 1 | shard 2 | shard 3
    pages that host 0 takes                      xxxxxxx | xxxxxxx |         |
    pages that host 1 takes                              |         | xxxxxxx | xxxxxxx

Every host maps whole tiles, so that offsets are the same everywhere, and takes only the pages of its own shards: shared memory
takes a page when it is first touched. A page that two hosts' shards meet in is taken by both. What another host has must not be
touched here, for reading either: it would read zeros, and take pages. For a moment, all ranks may make a tile whole
(`Store.whole_on_every_host`), one tile at a time.
"""
from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megacompile.errors import LaneError
from megacompile.runtime.memory.shards import held_by
from megacompile.runtime.memory.state_layout import scale_of
from megacompile.runtime.memory.tiles import HostTile, TileLayout
from megacompile.runtime.ranks import Ranks
from megacompile.system.host_memory import PAGE

#: Elements of a host tile.
Runs = tuple[slice, ...]
#: Bytes that a host sends at a time.
_CHUNK_BYTES = 1 << 24
_REMOVE = 9  # MADV_REMOVE of linux/mman.h


@dataclass(frozen=True)
class Division:
    """Where the elements of each host tile are. `shards`: the elements of each shard, by tile. `hosts`: the numbers of the
    shards that each host of a copy has. `here`: the number of this host among them."""

    shards: Mapping[str, Sequence[Runs]]
    hosts: tuple[tuple[int, ...], ...]
    here: int

    @classmethod
    def of(cls, streamed: Iterable[TileLayout], ranks: Ranks) -> Division | None:
        """None if each copy is on one host. `streamed`: the layouts of tiles as they are streamed."""
        hosts = ranks.hosts
        if hosts.spread == 1:
            return None
        shards: dict[str, list[list[slice]]] = {}
        for layout in streamed:
            own = shards.setdefault(layout.home or layout.name, [[] for _ in range(layout.ranks)])
            for shard, found in enumerate(own):
                found += _at_home(layout, held_by(layout, shard))
        numbers = [number for number, leader in enumerate(hosts.leaders) if leader in hosts.row]
        return cls({tile: [_merged(runs) for runs in each] for tile, each in shards.items()},
                   tuple(map(hosts.shards_of, numbers)), numbers.index(hosts.host))

    def of_host(self, tile: str, host: int) -> Runs:
        """The elements of a tile that a host has, in order."""
        return _merged(run for shard in self.hosts[host] for run in self.shards[tile][shard])

    def own(self, tile: str) -> Runs:
        """The elements of a tile that this host has."""
        return self.of_host(tile, self.here)


def _at_home(layout: TileLayout, held: slice) -> Iterator[slice]:
    """The elements of the host tile that are in `held`, elements of a slot."""
    if not layout.home:
        yield held
        return
    for position, s in enumerate(layout.slices):
        first, last = max(s.start, held.start), min(s.stop, held.stop)
        if first < last:
            start = layout.at_home(position).start + first - s.start
            yield slice(start, start + last - first)


def _merged(runs: Iterable[slice]) -> Runs:
    found: list[slice] = []
    for run in sorted(runs, key=lambda run: run.start):
        joined = bool(found) and found[-1].stop == run.start
        found.append(slice(found.pop().start if joined else run.start, run.stop))
    return tuple(found)


def within(runs: Runs, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The parts of runs in [start, stop), counted from `start`."""
    for run in runs:
        first, last = max(run.start, start), min(run.stop, stop)
        if first < last:
            yield first - start, last - start


def memory_of(tile: HostTile, parts: Collection[str], runs: Runs) -> Iterator[Tensor]:
    """The memory of these elements in the allocated parts of a tile, as bytes. In the same order on every host."""
    layout = tile.layout
    for memory in tile.memories(part for part in parts if part != "moments"):
        size = memory.nbytes // layout.elements
        for run in runs:
            yield memory.view(torch.uint8)[size * run.start:size * run.stop]
    if "moments" not in parts or not tile.moments:
        return
    for position, s in enumerate(layout.slices):
        for first, last in within(runs, s.start, s.stop) if s.trainable else ():
            moments = layout.state_layout.at(tile.moments, position, first, last)
            yield from (each.view(torch.uint8) for each in (*moments.values, *moments.scales))


def parts_of_run(tile: HostTile, position: int, first: int, last: int) -> Iterator[tuple[str, Tensor]]:
    """The stored tensors of the elements [first, last) of a parameter, with their names in a checkpoint: "weight", "remainder",
    and those of the optimizer's state."""
    s, layout = tile.layout.slices[position], tile.layout
    yield "weight", layout.flat(tile.weights)[s.start + first:s.start + last]
    if not s.trainable:
        return
    if tile.remainder is not None:
        yield "remainder", tile.remainder[s.start + first:s.start + last]
    if tile.moments:
        state = layout.state_of(position)
        moments = layout.state_layout.at(tile.moments, position, first, last)
        yield from zip(state.moments, moments.values, strict=True)
        yield from zip(map(scale_of, state.moments), moments.scales, strict=False)


# -------------------- Exchanges of a tile's memory between the hosts of a copy. The first rank of each of them makes them
def hand_out(tile: HostTile, parts: Collection[str], division: Division, ranks: Ranks,
             names: Collection[str] | None = None) -> None:
    """Sends the other hosts of the first copy what they have of a tile, or of these parameters of it, that is whole on the
    first host. Raises `RankError`."""
    views = _of_all_hosts(tile, parts, division, names)
    for start, stop in _chunks(views):
        staged = [_filled(each, start, stop) for each in views] if division.here == 0 else None
        mine = torch.empty(stop - start, dtype=torch.uint8)
        ranks.scatter(mine, staged)
        if division.here:
            _fill(views[division.here], start, stop, mine)


def collect(tile: HostTile, parts: Collection[str], division: Division, ranks: Ranks) -> None:
    """Makes a tile whole on every host of this copy. Raises `RankError`."""
    views = _of_all_hosts(tile, parts, division)
    for start, stop in _chunks(views):
        found = ranks.gather(_filled(views[division.here], start, stop))
        for host, each in enumerate(found):
            if host != division.here:
                _fill(views[host], start, stop, each)


def _of_all_hosts(tile: HostTile, parts: Collection[str], division: Division,
                  names: Collection[str] | None = None) -> list[list[Tensor]]:
    chosen = [slice(s.start, s.stop) for s in tile.layout.slices if names is None or s.name in names]
    chosen = [slice(0, tile.layout.elements)] if names is None else chosen
    return [[*memory_of(tile, parts, tuple(
        slice(each.start + first, each.start + last) for each in chosen
        for first, last in within(division.of_host(tile.layout.name, host), each.start, each.stop)))]
        for host in range(len(division.hosts))]


def _chunks(views: list[list[Tensor]]) -> Iterator[tuple[int, int]]:
    longest = max(sum(map(len, each)) for each in views)
    for start in range(0, longest, _CHUNK_BYTES):
        yield start, min(start + _CHUNK_BYTES, longest)


def _window(views: list[Tensor], start: int, stop: int) -> Iterator[tuple[Tensor, slice]]:
    """The bytes [start, stop) of all views in a row, with their places in a buffer of so many bytes."""
    at = 0
    for view in views:
        first, last = max(at, start), min(at + len(view), stop)
        if first < last:
            yield view[first - at:last - at], slice(first - start, last - start)
        at += len(view)


def _filled(views: list[Tensor], start: int, stop: int) -> Tensor:
    staged = torch.zeros(stop - start, dtype=torch.uint8)
    for view, there in _window(views, start, stop):
        staged[there] = view
    return staged


def _fill(views: list[Tensor], start: int, stop: int, values: Tensor) -> None:
    for view, there in _window(views, start, stop):
        view.copy_(values[there])


def give_back(tile: HostTile, parts: Collection[str], division: Division) -> None:
    """Returns the pages of a tile that only other hosts have shards in. Raises `LaneError` if the system refuses."""
    library = ctypes.CDLL(None, use_errno=True)
    own = [(view.data_ptr(), view.data_ptr() + len(view)) for view in memory_of(tile, parts, division.own(tile.layout.name))]
    for memory in tile.memories(parts):
        begin = at = memory.data_ptr()
        end = begin + memory.nbytes
        for first, last in (*sorted(each for each in own if begin <= each[0] < end), (end, end)):
            start, stop = -(-at // PAGE) * PAGE, first // PAGE * PAGE
            if start < stop and library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _REMOVE):
                raise LaneError(f"the system cannot take back pages of shared memory ({os.strerror(ctypes.get_errno())}): use "
                                "a kernel that supports MADV_REMOVE for memfd, or a copy of the model on each host")
            at = max(at, last)
