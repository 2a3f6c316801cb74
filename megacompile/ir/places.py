"""Places: where the values of a schedule live, as strings.

A place is a slot ("W0", a device buffer that tiles take turns in), a host slab ("D3"), a part of a tile in host memory
("weights/layers.0", "gradients/layers.0"), or a value's own memory ("%h1_0").
"""
from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence

from megacompile.ir.ops import OPS, Access, Lane

TILE_PARTS = ("weights", "gradients", "sums")
#: Families of slots, by the capital letters of a slot's name (a "B" after them: for border tiles; "b", "c", ...: for the
#: second, third, ... tile of a layer), and what kind of values each holds. R: weights that stay on the device; RW, RS, RG:
#: weights, optimizer state and gradients of a tile that is updated there; S, D: pinned host slabs for weights on their way
#: out and gradients on their way home; H: pinned host buffers of checkpoints, a set of them for each open forward; C:
#: checkpoints that have come back; V: a chunk of a tile that visits the device for its update.
SLOT_KINDS = {"W": ("weights",), "G": ("reduced",), "S": ("staging",), "D": ("slab",),
              "H": ("stashed",), "C": ("checkpoint", "inputs"), "V": ("visiting",),
              "R": ("weights",), "RW": ("weights", "resident"), "RS": ("state",), "RG": ("gradients", "reduced")}


@functools.cache
def lanes_that(access: Access, kind: str) -> frozenset[Lane]:
    """The lanes in which some op may access a place of this kind (`place_kind`): what a section must expect of others."""
    part = kind.removeprefix("host ")
    at_home = part != kind
    found = set()
    for op in OPS.values():
        rules = op.reads if access == Access.READ else op.writes
        if at_home:
            touches = any(r.startswith(f"{part}[") for r in rules) or ("result" in rules and op.home == part)
        else:
            touches = any(held in rules or ("result" in rules and op.result == held) for held in SLOT_KINDS[kind])
        if touches and op.lane is not None:
            found.add(op.lane)
    return frozenset(found)


def lanes_against(access: Access, kind: str) -> frozenset[Lane]:
    """The lanes in which some op may conflict with an access to a place of this kind: with a read writes, with a write all."""
    return lanes_that(Access.WRITE, kind) | (lanes_that(Access.READ, kind) if access == Access.WRITE else frozenset())


def place_kind(place: str) -> str | None:
    """"W" for "W0", "host weights" for "weights/layers.0": the family of places that ops treat alike. None: memory of a
    value's own, which no other section knows."""
    return None if place.startswith("%") else _kind_of_known(place)


@functools.lru_cache(maxsize=4096)
def _kind_of_known(place: str) -> str:
    part = place.split("/")[0]
    return f"host {part}" if part in TILE_PARTS else slot_family(place)


def slot_family(slot: str) -> str:
    """"W" for "W0", "WB0" and "Wb0"."""
    return slot.rstrip("0123456789").rstrip("bcdefghijklmnopqrstuvwxyz").removesuffix("B")


def slot_ranks(layers: Iterable[Sequence[str]], border: Collection[str], weight_bytes: Callable[[str], int]) -> dict[str, int]:
    """Of each tile that `layers` (the tiles of each) read, those in `border` aside: its rank among the tiles of its layer, the
    largest first. All of a layer's are there at once, and those of one rank take turns in slots that fit them."""
    ranks: dict[str, int] = {}
    for tiles in layers:
        new = sorted((t for t in tiles if t not in ranks and t not in border), key=lambda t: -weight_bytes(t))
        taken = {ranks[t] for t in tiles if t in ranks}
        ranks |= zip(new, (rank for rank in itertools.count() if rank not in taken), strict=False)
    return ranks


def rank_letter(rank: int) -> str:
    """What stands behind the letters of a slot's family: nothing for the first rank, then b, c, ..."""
    assert rank < 26, f"{rank + 1} tiles in one layer"
    return "" if rank == 0 else chr(ord("a") + rank)


def stays(place: str) -> bool:
    """Whether what is there outlives sections."""
    return place.startswith("R")
