"""Names of slots: a family, what takes turns there, and a number; `SlotName` puts them together and takes them apart.

    W0, W1    two slots of family W, for layers' largest tiles
    Wb0       for the second largest tile of a layer, its rank 1
    WB0       for a boundary tile: of the prologue, the epilogue or a tied weight
    RW3       for one tile that stays on the device
"""
from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from enum import StrEnum

_NAME = re.compile(r"(?P<family>[A-Z]+?)(?P<boundary>B?)(?P<rank>[b-z]?)(?P<number>\d+)")
#: Tiles of one layer that may differ in size.
MOST_RANKS = 26


class Family(StrEnum):
    """Families of slots. A value is the letters that the names of the family's slots begin with."""

    WEIGHTS = "W"
    GRADIENTS = "G"  # reduced
    WEIGHT_SLABS = "S"  # pinned host memory, for weights on their way to the device
    GRADIENT_SLABS = "D"  # pinned host memory, for gradients on their way to the host
    WEIGHT_SHARDS = "P"  # one rank's share of a tile's weights
    HOST_CHECKPOINTS = "H"  # pinned host memory, one set for each open forward
    FETCHED_CHECKPOINTS = "C"  # on the device again
    STATE_SLABS = "M"  # host memory, for moments between the disk and their update
    VISITING = "V"  # a chunk of a tile that visits the device for its update
    RESIDENT = "R"  # weights that stay on the device
    UPDATED_WEIGHTS = "RW"  # of a tile that is updated on the device; so are the next two
    UPDATED_STATE = "RS"
    UPDATED_GRADIENTS = "RG"


#: Families whose slots each open forward has a set of.
OF_A_FORWARD = frozenset({Family.HOST_CHECKPOINTS})
#: Families whose slots outlive sections: each holds one tile's weights, state or gradients.
RESIDENT_FAMILIES = frozenset(
    {Family.RESIDENT, Family.UPDATED_WEIGHTS, Family.UPDATED_STATE, Family.UPDATED_GRADIENTS})


@dataclass(frozen=True, order=True)
class SlotName:
    """`family`: a `Family`; or other letters, in a program's text, which the verifier refuses. `rank`: which tile of a layer
    takes turns here, 0 for the largest. `boundary`: for boundary tiles. Programs list their slots in this order."""

    family: str
    rank: int = 0
    boundary: bool = False
    number: int = 0

    def __post_init__(self) -> None:
        assert self.rank < MOST_RANKS, f"{self.rank + 1} tiles in one layer"

    def __str__(self) -> str:
        letter = chr(ord("a") + self.rank) if self.rank else ""
        return f"{self.family}{'B' * self.boundary}{letter}{self.number}"

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def parse(cls, text: str) -> SlotName | None:
        """The name that prints as `text`; None if it is not the name of a slot."""
        found = _NAME.fullmatch(text)
        if found is None:
            return None
        name = cls(found["family"], ord(found["rank"] or "a") - ord("a"), bool(found["boundary"]), int(found["number"]))
        return name if str(name) == text else None

    @property
    def resident(self) -> bool:
        """Whether what is in the slot outlives sections."""
        return self.family in RESIDENT_FAMILIES
