"""Places: where the values of a schedule live, as strings.

A place is a slot ("W0", a device buffer that tiles take turns in), a host slab ("D3"), a part of a tile in host memory
("weights/layers.0", "gradients/layers.0"), or a value's own memory ("%h1_0").
"""
from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from megacompile.ir.ops import OPS, Access, Lane

# --------------------
# Names of slots: a family, what takes turns there, and a number; `SlotName` puts them together and takes them apart.
#
#     W0, W1    two slots of family W, for layers' largest tiles
#     Wb0       for the second largest tile of a layer, its size class 1
#     WB0       for a boundary tile: of the prologue, the epilogue or a tied weight
#     RW3       for one tile that stays on the device
_NAME = re.compile(r"(?P<family>[A-Z]+?)(?P<boundary>B?)(?P<size_class>[b-z]?)(?P<number>\d+)")
#: Tiles of one layer that may differ in size.
MOST_SIZE_CLASSES = 26


class Family(StrEnum):
    """Families of slots. The value is the prefix of the slots' names."""

    WEIGHTS = "W"
    GRADIENTS = "G"  # reduced
    WEIGHT_SLABS = "S"  # pinned host memory, for weights on their way to the device
    GRADIENT_SLABS = "D"  # pinned host memory, for gradients on their way to the host
    WEIGHT_SHARDS = "P"  # one rank's share of a tile's weights
    HOST_CHECKPOINTS = "H"  # pinned host memory, one set for each open forward
    FETCHED_CHECKPOINTS = "C"  # on the device again
    STATE_SLABS = "M"  # host memory, for moments between the disk and their update
    VISITING = "V"  # a chunk of a tile that visits the device for its update
    MOMENTUM = "N"  # of the matrices of a visiting tile, of all ranks
    HELD = "RH"  # a tile from the end of its backward to that of its update; memory that lives as long
    RESIDENT = "R"  # weights that stay on the device
    UPDATED_WEIGHTS = "RW"  # of a tile that is updated on the device; so are the next two
    UPDATED_STATE = "RS"
    UPDATED_GRADIENTS = "RG"


#: Families whose slots each open forward has a set of.
OF_A_FORWARD = frozenset({Family.HOST_CHECKPOINTS})
#: Families whose slots outlive sections: each holds one tile's weights, state or gradients.
RESIDENT_FAMILIES = frozenset(
    {Family.RESIDENT, Family.UPDATED_WEIGHTS, Family.UPDATED_STATE, Family.UPDATED_GRADIENTS, Family.HELD})


@dataclass(frozen=True, order=True)
class SlotName:
    """`family`: a `Family`, or letters in a program's text that the verifier refuses. `size_class`: see `size_classes`.
    `boundary`: the slot is for boundary tiles. Programs list their slots in this order."""

    family: str
    size_class: int = 0
    boundary: bool = False
    number: int = 0

    def __post_init__(self) -> None:
        assert self.size_class < MOST_SIZE_CLASSES, f"{self.size_class + 1} tiles in one layer"

    def __str__(self) -> str:
        letter = chr(ord("a") + self.size_class) if self.size_class else ""
        return f"{self.family}{'B' * self.boundary}{letter}{self.number}"

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def parse(cls, text: str) -> SlotName | None:
        """The name that prints as `text`; None if `text` is not the name of a slot."""
        found = _NAME.fullmatch(text)
        if found is None:
            return None
        name = cls(found["family"], ord(found["size_class"] or "a") - ord("a"), bool(found["boundary"]), int(found["number"]))
        return name if str(name) == text else None

    @property
    def resident(self) -> bool:
        """True if the slot's contents outlive sections."""
        return self.family in RESIDENT_FAMILIES


TILE_PARTS = ("weights", "gradients", "sums", "moments")
#: Families of slots and the kinds of values that each holds.
SLOT_KINDS: Mapping[str, tuple[str, ...]] = {
    Family.WEIGHTS: ("weights",), Family.GRADIENTS: ("reduced",), Family.WEIGHT_SLABS: ("staging", "packed_shard"),
    Family.GRADIENT_SLABS: ("slab",), Family.WEIGHT_SHARDS: ("shard",), Family.HOST_CHECKPOINTS: ("stashed",),
    Family.FETCHED_CHECKPOINTS: ("checkpoint", "inputs"), Family.VISITING: ("visiting",), Family.MOMENTUM: ("momentum",),
    Family.STATE_SLABS: ("moments",), Family.HELD: ("held",), Family.RESIDENT: ("weights",),
    Family.UPDATED_WEIGHTS: ("weights", "resident"), Family.UPDATED_STATE: ("state",),
    Family.UPDATED_GRADIENTS: ("gradients", "reduced")}


@functools.cache
def lanes_that(access: Access, kind: str, several_ranks: bool = False) -> frozenset[Lane]:
    """The lanes that have an op which may access a place of this kind (`place_kind`). Other sections may use any of them. The
    lane `collective` counts only if `several_ranks`, of one host or of several, run programs together."""
    found = set()
    for op in OPS.values():
        if op.only_waits or (op.lane == Lane.COLLECTIVE and not several_ranks):
            continue
        rules = op.reads if access == Access.READ else op.writes
        if kind in TILE_PARTS:
            touches = any(r.startswith(f"{kind}[") for r in rules) or ("result" in rules and op.home == kind)
        else:
            touches = any(held in rules or ("result" in rules and op.result == held) for held in SLOT_KINDS[kind])
        if touches and op.lane is not None:
            found.add(op.lane)
    return frozenset(found)


def lanes_against(access: Access, kind: str, several_ranks: bool = False) -> frozenset[Lane]:
    """The lanes that have an op which may conflict with an access to a place of this kind. Reads conflict only with writes."""
    readers = lanes_that(Access.READ, kind, several_ranks) if access == Access.WRITE else frozenset()
    return lanes_that(Access.WRITE, kind, several_ranks) | readers


def tile_place(part: str, tile: str) -> str:
    """The place of a part of a tile in host memory."""
    return f"{part}/{tile}"


def place_kind(place: str) -> str | None:
    """The family of places that ops treat alike: "W" for "W0", "weights" for "weights/layers.0". None for a value's own
    memory, which no other section knows."""
    return None if place.startswith("%") else _kind_of_known(place)


@functools.lru_cache(maxsize=4096)
def _kind_of_known(place: str) -> str:
    return next((part for part in TILE_PARTS if place.startswith(tile_place(part, ""))), slot_family(place))


def slot_family(slot: str) -> str:
    """The family of a slot: "W" for "W0", "WB0" and "Wb0"; "" for other strings."""
    name = SlotName.parse(slot)
    return name.family if name is not None else ""


def size_classes(layers: Iterable[Sequence[str]], boundary: Collection[str],
               weight_bytes: Callable[[str], int]) -> dict[str, int]:
    """The size class of each tile: 0 for the largest tile of its layer, 1 for the next. `layers`: the tiles that each layer
    reads. Tiles in `boundary` have none. All tiles of a layer are on the device together. Tiles of one size class take turns
    in slots."""
    classes: dict[str, int] = {}
    for tiles in layers:
        new = sorted((t for t in tiles if t not in classes and t not in boundary), key=lambda t: -weight_bytes(t))
        taken = {classes[t] for t in tiles if t in classes}
        classes |= zip(new, (number for number in itertools.count() if number not in taken), strict=False)
    return classes


def stays(place: str) -> bool:
    """True if values in this place outlive sections."""
    name = SlotName.parse(place)
    return name is not None and name.resident
