"""Which tiles have their moments on disk: those that the user names, or the fewest that let training fit host memory.

The tiles are spread evenly over the order of updates, so that the disk reads and writes while the host updates the others.
Tiles of layers come first: boundary tiles are the largest, and each would need a slab of its size.
"""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import replace

from megacompile.errors import MegacompileError, UnsupportedError, listed
from megacompile.ir.placement import LISTS_OF_UPDATED, Updated
from megacompile.ir.plan import STATE_SLABS
from megacompile.planning.config import StreamConfig
from megacompile.planning.memory import state_slab_bytes
from megacompile.weights.tiling import HOST_MARGIN_BYTES, Tiling


def with_disk(tiling: Tiling, config: StreamConfig, budget_bytes: int, on_arrival: bool, *, there: Collection[str] = (),
              in_memory: Collection[str] = ()) -> Tiling:
    """The tiling with moments on disk, if `config` has one. `budget_bytes`: of host memory, for training. `on_arrival`: no
    gradients wait there. `there`, `in_memory`: tiles whose moments stay where they are, on disk or in memory.

    Raises `MegacompileError` for named tiles that cannot be there. What does not fit anyway is not refused here."""
    if config.disk is None:
        return tiling
    if tiling.hosts > 1:
        raise UnsupportedError(f"disk holds the optimizer state of one host, and {tiling.hosts} train this model: leave disk "
                               "out, or train on one host")
    named = config.disk_state
    able = [tile for tile in candidates(tiling, config) if tile not in in_memory]
    if named not in (None, "all"):
        _check_named(tiling, [tile for tile in named or () if tile not in in_memory], able)
    if named is not None:
        return replace(tiling, on_disk=tuple(tile for tile in able if named == "all" or tile in named or tile in there))
    fixed = [tile for tile in able if tile in there]
    free = [tile for tile in able if tile not in there]
    layers = [tile for tile in free if tile not in tiling.boundary()]
    boundary = [tile for tile in free if tile in tiling.boundary()]

    def chosen(count: int) -> Tiling:
        on_disk = {*fixed, *spread(layers, min(count, len(layers))), *boundary[:max(0, count - len(layers))]}
        return replace(tiling, on_disk=tuple(tile for tile in tiling.layouts if tile in on_disk))

    for slabs in (STATE_SLABS, 1) if config.state_slabs is None else (config.state_slabs,):
        def fits(count: int, slabs: int = slabs) -> bool:
            return host_bytes(chosen(count), on_arrival, slabs) <= budget_bytes

        # The first tiles gain nothing, since slabs are as large. From then on each gains as much as it has moments.
        fewest = 0 if fits(0) else bisect_left(range(len(free) + 1), True, lo=1, key=fits)
        if fewest <= len(free):
            return chosen(fewest)
    return chosen(len(free))


def host_bytes(tiling: Tiling, on_arrival: bool, slabs: int = 1) -> int:
    """Bytes of host memory that training takes, the margin of each rank included, and so many slabs of each rank for moments on
    disk."""
    return (tiling.host_bytes(gradients=not on_arrival) + tiling.ranks * HOST_MARGIN_BYTES
            + state_slab_bytes(tiling, slabs))


def candidates(tiling: Tiling, config: StreamConfig) -> list[str]:
    """The tiles whose moments may be on disk: the host updates them, whole, and no option places them elsewhere."""
    elsewhere: set[str] = set()
    for option in LISTS_OF_UPDATED:
        names = getattr(config, option)
        if option != Updated.FROM_DISK and names not in (None, "all"):
            elsewhere.update(names)
    return [tile for tile, layout in tiling.layouts.items()
            if layout.disk_bytes and not layout.home and not layout.has_matrices and tile not in elsewhere]


def _check_named(tiling: Tiling, named: Sequence[str], able: Collection[str]) -> None:
    """Raises `MegacompileError` for a named tile that is not able."""
    for tile in (tile for tile in named if tile not in able and tile in tiling.layouts):
        layout = tiling.layouts[tile]
        why = ("whole matrices are updated on the device" if layout.has_matrices
               else "it is a part of a tile, since experts are in pieces" if layout.home else "it is frozen")
        raise MegacompileError(f"disk_state names {tile}, whose moments cannot be on disk ({why}): leave it out; "
                               f"{listed(list(able)) or 'no tile'} can")


def spread(tiles: Sequence[str], count: int) -> list[str]:
    """So many of the tiles, evenly spread."""
    return [tile for number, tile in enumerate(tiles)
            if (number + 1) * count // len(tiles) > number * count // len(tiles)]
