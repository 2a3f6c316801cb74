"""Places: where the values of a schedule live, as strings.

A place is a slot ("W0", a device buffer that tiles take turns in), a host slab ("D3"), a part of a tile in host memory
("weights/layers.0", "gradients/layers.0"), or a value's own memory ("%h1_0").
"""
from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from megacompile.ir.ops import OPS, Access, Lane
from megacompile.ir.slots import Family, SlotName

TILE_PARTS = ("weights", "gradients", "sums", "moments")
#: Families of slots and the kinds of values that each holds.
SLOT_KINDS: Mapping[str, tuple[str, ...]] = {
    Family.WEIGHTS: ("weights",), Family.GRADIENTS: ("reduced",), Family.WEIGHT_SLABS: ("staging", "packed_shard"),
    Family.GRADIENT_SLABS: ("slab",), Family.WEIGHT_SHARDS: ("shard",), Family.HOST_CHECKPOINTS: ("stashed",),
    Family.FETCHED_CHECKPOINTS: ("checkpoint", "inputs"), Family.VISITING: ("visiting",), Family.STATE_SLABS: ("moments",),
    Family.RESIDENT: ("weights",),
    Family.UPDATED_WEIGHTS: ("weights", "resident"), Family.UPDATED_STATE: ("state",),
    Family.UPDATED_GRADIENTS: ("gradients", "reduced")}


@functools.cache
def lanes_that(access: Access, kind: str, several_ranks: bool = False) -> frozenset[Lane]:
    """The lanes that have an op which may access a place of this kind (`place_kind`). Other sections may use any of them. The
    lane `collective` counts only where `several_ranks`, of one host or of several, run programs together."""
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
    """The lanes that have an op which may conflict with an access to a place of this kind. Reads conflict with writes; writes
    conflict with every access."""
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


def slot_ranks(layers: Iterable[Sequence[str]], boundary: Collection[str],
               weight_bytes: Callable[[str], int]) -> dict[str, int]:
    """The rank of each tile among the tiles of its layer, the largest first. `layers`: the tiles that each layer reads. Tiles
    in `boundary` have no rank. All tiles of a layer are on the device together; tiles of one rank take turns in slots."""
    ranks: dict[str, int] = {}
    for tiles in layers:
        new = sorted((t for t in tiles if t not in ranks and t not in boundary), key=lambda t: -weight_bytes(t))
        taken = {ranks[t] for t in tiles if t in ranks}
        ranks |= zip(new, (rank for rank in itertools.count() if rank not in taken), strict=False)
    return ranks


def stays(place: str) -> bool:
    """Whether values in this place outlive sections."""
    name = SlotName.parse(place)
    return name is not None and name.resident
