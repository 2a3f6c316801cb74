"""Places: where the values of a schedule live, as strings.

A place is a slot ("W0", a device buffer that tiles take turns in), a host slab ("D3"), a part of a tile in host memory
("weights/layers.0", "gradients/layers.0"), or a value's own memory ("%h1_0").
"""
from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence

from megacompile.ir.ops import OPS, Access, Lane
from megacompile.ir.slots import SlotName

TILE_PARTS = ("weights", "gradients", "sums", "moments")
#: Families of slots (`SlotName.family`) and the kinds of values that each holds.
#: W: weights; G: reduced gradients; R: weights that stay on the device; RW, RS, RG: weights, optimizer state and gradients of a
#: tile that is updated there; S, D: pinned host slabs for weights on their way to the device and gradients on their way to the
#: host; H: pinned host buffers of checkpoints, one set for each open forward; C: device slots for checkpoints fetched back; V:
#: a chunk of a tile that visits the device for its update; P: a rank's shard of a tile's weights; M: host slabs for moments
#: between the disk and their update.
SLOT_KINDS = {"W": ("weights",), "G": ("reduced",), "S": ("staging", "packed_shard"), "D": ("slab",), "P": ("shard",),
              "H": ("stashed",), "C": ("checkpoint", "inputs"), "V": ("visiting",), "M": ("moments",),
              "R": ("weights",), "RW": ("weights", "resident"), "RS": ("state",), "RG": ("gradients", "reduced")}


@functools.cache
def lanes_that(access: Access, kind: str, several_ranks: bool = False) -> frozenset[Lane]:
    """The lanes that have an op which may access a place of this kind (`place_kind`). Other sections may use any of them. The
    lane `collective` counts only where `several_ranks`, of one host or of several, run programs together."""
    found = set()
    for op in OPS.values():
        if op.lane == Lane.COLLECTIVE and not several_ranks:
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


def place_kind(place: str) -> str | None:
    """The family of places that ops treat alike: "W" for "W0", "weights" for "weights/layers.0". None for a value's own
    memory, which no other section knows."""
    return None if place.startswith("%") else _kind_of_known(place)


@functools.lru_cache(maxsize=4096)
def _kind_of_known(place: str) -> str:
    part = place.split("/")[0]
    return part if part in TILE_PARTS else slot_family(place)


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
