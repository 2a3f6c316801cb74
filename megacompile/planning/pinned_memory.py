"""Pinned host memory: whether the tiles themselves are pinned, or else how many pinned slabs their contents pass through."""
from __future__ import annotations

from dataclasses import dataclass

from megacompile.errors import InsufficientMemoryError
from megacompile.sizes import format_bytes
from megacompile.weights.tiling import Tiling

#: Slabs for weights on their way to the device: one is filled while the other is sent.
STAGING_SLABS = 2


@dataclass(frozen=True)
class PinnedMemory:
    """How a budget is spent. `tiles`: the tiles themselves are pinned, and slabs serve only backwards that add to gradients.
    `staging_slabs`, `gradient_slabs`: the contents of how many layers may be in transit."""

    tiles: bool
    staging_slabs: int
    gradient_slabs: int


def spend_pinned_memory(tiling: Tiling, budget: int | None, gradient_slabs: int) -> PinnedMemory:
    """Spends at most `budget` bytes (None: no limit) on at most `gradient_slabs` slabs for gradients, fewer if they do not fit.

    Raises `InsufficientMemoryError` if not even one slab for weights and one for gradients fit."""
    if budget is None:
        return PinnedMemory(True, STAGING_SLABS, gradient_slabs)
    boundary, layouts = tiling.boundary(), tiling.layouts.values()
    trained = [x for x in layouts if x.trainable]
    # Boundary tiles have their own slabs, one for weights and one for gradients.
    boundary_weights = max((x.weight_bytes for x in layouts if x.name in boundary), default=0)
    boundary_gradients = max((x.gradient_bytes for x in trained if x.name in boundary), default=0)
    ranked = tiling.ranked()  # the tiles of each rank have their own slabs
    weights = sum(max(x.weight_bytes for x in layers) for layers in ranked)
    gradients = sum(max((x.gradient_bytes for x in layers if x.trainable), default=0) for layers in ranked)

    def slabs_in(available: int) -> int:
        return min(gradient_slabs, available // gradients) if gradients else gradient_slabs

    left = budget - sum(x.weight_bytes for x in layouts) - sum(x.gradient_bytes for x in trained) - boundary_gradients
    if left >= gradients:
        return PinnedMemory(True, STAGING_SLABS, slabs_in(left))
    for staging in range(STAGING_SLABS, 0, -1):
        left = budget - boundary_weights - boundary_gradients - staging * weights
        if left >= gradients:
            return PinnedMemory(False, staging, slabs_in(left))
    least = boundary_weights + boundary_gradients + weights + gradients
    raise InsufficientMemoryError(
        f"weights and gradients pass through at least {format_bytes(least)} of pinned memory, and pinned_memory is "
        f"{format_bytes(budget)}: give more, or leave it out")
