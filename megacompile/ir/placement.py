"""Placements: where each tile is updated, and whether its weights stay on the device.

    placements = Placements.named(resident=("prologue", "layers.0"), visiting_state=("layers.0", "layers.1"))
    placements["layers.0"]                                 # Placement(Updated.VISITING, resident=True)
    placements.lists["visiting_state"]                     # ("layers.0", "layers.1")

A tile has one placement, so no plan updates it in two places. Options, texts and files name tiles in lists instead, one for
each place; `Placements.named` reads such lists, and `lists` gives them. A new place is a new member of `Updated`: an option of
its name in `StreamConfig`, a property of `Plan`, the op that updates such tiles (`passes/schedule/optimizer.py`), and what
`offload.py`, `memory.py` and `step_time.py` make of it.
"""
from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations

from megacompile.errors import MegacompileError, listed


class Updated(StrEnum):
    """The place where a tile is updated, and where its gradients are added up between waves. Each value but the first names a
    list of tiles."""

    ON_HOST = "host"  # gradients are added up on the device
    ON_DEVICE = "resident_state"  # weights, optimizer state and gradients stay there
    VISITING = "visiting_state"  # on the device, to which weights, gradients and state are copied in chunks, and back
    HELD = "held_state"  # on the device, to which weights and state are copied during the backward, and back after the update
    FROM_HOST_SUMS = "host_sums"  # on the host, where gradients are added up in FP32
    FROM_DISK = "disk_state"  # on the host; moments are read from the disk into a slab before, and written back after


@dataclass(frozen=True)
class Placement:
    """The place where a tile is updated, and whether its weights stay on the device (`resident`). They do if it is
    `ON_DEVICE`."""

    updated: Updated = Updated.ON_HOST
    resident: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "resident", self.resident or self.updated is Updated.ON_DEVICE)


#: The placement of tiles that plans do not name: weights are copied to the device for each use, and the host updates them.
STREAMED = Placement()
#: The names of the lists that say where tiles are updated, and of all lists of tiles.
LISTS_OF_UPDATED = tuple(each.value for each in Updated if each is not STREAMED.updated)
LISTS = ("resident", *LISTS_OF_UPDATED)


class Placements(Mapping[str, Placement]):
    """Maps tiles to placements, for all tiles that are not `STREAMED`. Immutable. `lists`: name of a list -> its tiles. Slots
    of resident tiles are numbered in the order of the tiles. Placements are equal if their lists are, order included."""

    def __init__(self, placed: Mapping[str, Placement] | None = None) -> None:
        self._placed = {tile: placement for tile, placement in (placed or {}).items() if placement != STREAMED}
        lists: dict[str, list[str]] = {name: [] for name in LISTS}
        for tile, placement in self._placed.items():
            if placement.resident:
                lists["resident"].append(tile)
            if placement.updated in lists:
                lists[placement.updated].append(tile)
        self.lists: Mapping[str, tuple[str, ...]] = {name: tuple(tiles) for name, tiles in lists.items()}

    @classmethod
    def named(cls, resident: Sequence[str] = (), **updated: Sequence[str]) -> Placements:
        """The placements with these lists of tiles, by name. Tiles of `resident_state` need not be in `resident`. Lists keep
        their order, unless it contradicts the order of the resident tiles. Raises `MegacompileError` for a tile that is named
        twice in a list, or in two lists that say where it is updated."""
        lists = {name: updated[name] for name in sorted(updated, key=LISTS.index)}
        for name, tiles in {"resident": resident, **lists}.items():
            if len(set(tiles)) < len(tiles):
                raise MegacompileError(f"{name} names a tile twice: name each once")
        check_disjoint(lists)
        stay = dict.fromkeys((*resident, *lists.get(Updated.ON_DEVICE, ())))
        position = {tile: (number, False) for number, tile in enumerate(stay)}
        for tiles in lists.values():
            number = -1
            for tile in tiles:  # one that does not stay comes after the resident tile before it in this list
                number, _ = position.setdefault(tile, (number, True))
        where = {tile: Updated(name) for name, tiles in lists.items() for tile in tiles}
        return cls({tile: Placement(where.get(tile, STREAMED.updated), tile in stay)
                    for tile in sorted(position, key=position.__getitem__)})

    def placed(self, updated: Updated, tiles: Sequence[str]) -> Placements:
        """These placements, with exactly these tiles updated in this way. Other tiles that were updated in this way are now
        updated by the host. Weights stay where they are, except those of tiles that the device no longer updates, which leave
        the device."""
        moved = set(tiles)
        left = {name: tuple(tile for tile in names if tile not in moved) for name, names in self.lists.items()}
        gone = set(left[Updated.ON_DEVICE]) if updated is Updated.ON_DEVICE else set()
        resident = tuple(tile for tile in self.lists["resident"] if tile not in gone)
        return Placements.named(**left | {"resident": resident, updated.value: tuple(tiles)})

    def __getitem__(self, tile: str) -> Placement:
        return self._placed[tile]

    def of(self, tile: str) -> Placement:
        """The placement of a tile; `STREAMED` if it has no entry."""
        return self._placed.get(tile, STREAMED)

    def __iter__(self) -> Iterator[str]:
        return iter(self._placed)

    def __len__(self) -> int:
        return len(self._placed)

    def __eq__(self, other: object) -> bool:
        return self.lists == other.lists if isinstance(other, Placements) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self.lists.values()))

    def __repr__(self) -> str:
        return f"Placements.named({', '.join(f'{name}={tiles!r}' for name, tiles in self.lists.items() if tiles)})"


#: For a plan that names no tile.
ALL_STREAMED = Placements()


def check_disjoint(lists: Mapping[str, Collection[str]]) -> None:
    """Raises `MegacompileError` for a tile in two of these lists, which say where tiles are updated."""
    for (first, tiles), (second, others) in combinations(lists.items(), 2):
        if both := set(tiles).intersection(others):
            raise MegacompileError(f"{first} and {second} both name {listed(sorted(both))}, and a tile is updated in one "
                                   "place: name it in only one of them")
