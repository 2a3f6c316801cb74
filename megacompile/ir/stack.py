"""What follows from which tiles each call reads: the layers that have a backward, and the tiles at the boundary."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Reader(Protocol):
    """A call, as `CallSpec` has it."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def tiles(self) -> tuple[str, ...]: ...


def first_trained(calls: Sequence[Reader], trains: Callable[[str], bool]) -> int:
    """The number of the first call that reads a tile that `trains`; the number of calls if none does."""
    return next((i for i, call in enumerate(calls) if any(map(trains, call.tiles))), len(calls))


def differentiated_layers(calls: Sequence[Reader], trains: Callable[[str], bool]) -> list[str]:
    """The layers that a backward goes through, by name: layers below the first call that trains have no backward."""
    return [call.name for call in calls[first_trained(calls, trains):] if call.role == "layer"]


def boundary_tiles(calls: Sequence[Reader]) -> set[str]:
    """The tiles that the prologue or the epilogue reads. They are the largest, and have slots of their own."""
    return {tile for call in calls if call.role != "layer" for tile in call.tiles}
