"""Pinned host memory: whether the tiles have it themselves, else through how many slabs their contents pass."""
from __future__ import annotations

from dataclasses import dataclass

from megacompile.errors import InsufficientMemoryError
from megacompile.frontend.capture import CapturedModel
from megacompile.sizes import format_bytes
from megacompile.weights.tiling import Tiling

#: Weights on their way out: one is filled while the other is sent.
STAGING_SLABS = 2


@dataclass(frozen=True)
class PinnedMemory:
    """How a budget is spent. `tiles`: they are pinned themselves, and slabs serve only backwards that add to gradients.
    `staging_slabs`, `gradient_slabs`: how many layers' contents may be under way."""

    tiles: bool
    staging_slabs: int
    gradient_slabs: int


def spend_pinned_memory(captured: CapturedModel, tiling: Tiling, budget: int | None, gradient_slabs: int) -> PinnedMemory:
    """At most `gradient_slabs`, and at most `budget` bytes in all (None: no limit): fewer slabs where it is too little.

    Raises `InsufficientMemoryError` where not even one slab for weights and one for gradients fits."""
    if budget is None:
        return PinnedMemory(True, STAGING_SLABS, gradient_slabs)
    border, layouts = tiling.border(captured.calls), tiling.layouts.values()
    trained = [x for x in layouts if x.trainable]
    # The border's tiles have slabs of their own, one for weights and one for gradients.
    border_weights = max((x.weight_bytes for x in layouts if x.name in border), default=0)
    border_gradients = max((x.gradient_bytes for x in trained if x.name in border), default=0)
    ranked = tiling.ranked(captured.calls)  # tiles of each rank have slabs of their own
    weights = sum(max(x.weight_bytes for x in layers) for layers in ranked)
    gradients = sum(max((x.gradient_bytes for x in layers if x.trainable), default=0) for layers in ranked)

    def slabs_in(room: int) -> int:
        return min(gradient_slabs, room // gradients) if gradients else gradient_slabs

    left = budget - sum(x.weight_bytes for x in layouts) - sum(x.gradient_bytes for x in trained) - border_gradients
    if left >= gradients:
        return PinnedMemory(True, STAGING_SLABS, slabs_in(left))
    for staging in range(STAGING_SLABS, 0, -1):
        left = budget - border_weights - border_gradients - staging * weights
        if left >= gradients:
            return PinnedMemory(False, staging, slabs_in(left))
    least = border_weights + border_gradients + weights + gradients
    raise InsufficientMemoryError(
        f"weights and gradients pass through at least {format_bytes(least)} of pinned memory, and pinned_memory is "
        f"{format_bytes(budget)}: give more, or leave it out")
