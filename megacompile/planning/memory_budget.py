"""Memory that plans may take on the device and the host: which plans fit, and the error where none does."""
from __future__ import annotations

import functools
from dataclasses import dataclass

from megacompile.errors import InsufficientMemoryError, NoFittingPlanError
from megacompile.frontend.capture import CapturedModel
from megacompile.ir.plan import Plan
from megacompile.planning.config import StreamConfig
from megacompile.planning.memory import Estimate, evaluation_bytes, host_parts, training_bytes, training_moments
from megacompile.sizes import format_bytes
from megacompile.weights.tiling import Tiling

# --------------------
# Pinned host memory: whether the tiles themselves are pinned, or else how many pinned slabs their contents pass through.
#: Slabs for weights on their way to the device: one is filled while the other is sent.
STAGING_SLABS = 2


@dataclass(frozen=True)
class PinnedMemory:
    """The use of a budget. `tiles`: the tiles themselves are pinned, and slabs serve only backwards that add to gradients.
    `staging_slabs`, `gradient_slabs`: how many layers' contents may be in transit."""

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
    classes = tiling.size_classes()  # the tiles of each size class have their own slabs
    weights = sum(max(x.weight_bytes for x in layers) for layers in classes)
    gradients = sum(max((x.gradient_bytes for x in layers if x.trainable), default=0) for layers in classes)

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


#: Device memory outside of all estimates: workspaces of cuBLAS, loaded kernels.
MARGIN_BYTES = 1 << 29


def margins(device_type: str) -> tuple[int, bool]:
    """`margin_bytes` and `keep_residuals` for a device. On the CPU "device memory" is host memory, which tiles need more."""
    return (MARGIN_BYTES, True) if device_type == "cuda" else (0, False)


@dataclass(frozen=True)
class MemoryBudget:
    """The memory that one model's plans may take."""

    captured: CapturedModel
    tiling: Tiling
    config: StreamConfig
    budget_bytes: int  # budget of device memory
    pinned_bytes: int | None = None  # budget of pinned memory; None: no limit
    margin_bytes: int = MARGIN_BYTES
    keep_residuals: bool = True  # in unused device memory
    fused: bool = False  # templates run compiled
    taken_bytes: int = 0  # of the budget, planned by other models
    host_bytes: int = 1 << 62  # budget of host memory, tiles included

    @functools.cached_property
    def layers(self) -> list[str]:
        """The names of the layers that have a backward."""
        return [call.name for call in self.tiling.differentiated(self.captured.calls)]

    @property
    def device_bytes(self) -> int:
        """Bytes of the device budget that other models have not planned."""
        return max(0, self.budget_bytes - self.taken_bytes)

    @property
    def host_bytes_left(self) -> int:
        """Bytes of the host budget that a plan may take beyond weights, state, and each rank's budget of pinned memory."""
        slabs = 0 if self.pinned_bytes is None or self.pinned().tiles else self.pinned_bytes  # they take no more
        fixed = self.tiling.host_bytes(gradients=False) + self.tiling.margin_bytes + self.tiling.ranks_here * slabs
        return max(0, self.host_bytes - fixed)

    def fits(self, plan: Plan) -> bool:
        """True if a training step under a plan fits the device and the host."""
        return self.fits_device(plan) and self.fits_host(plan)

    def fits_device(self, plan: Plan) -> bool:
        return self.estimate(plan).total + self.margin_bytes <= self.device_bytes

    def fits_host(self, plan: Plan) -> bool:
        return sum(self.host_parts(plan).values()) <= self.host_bytes_left

    def host_parts(self, plan: Plan) -> dict[str, int]:
        """Bytes of host memory that a plan takes in addition to weights and state, by purpose."""
        return host_parts(self.captured, self.tiling, plan)

    def pinned(self) -> PinnedMemory:
        """The use of the budget of pinned memory. Raises `InsufficientMemoryError`."""
        return spend_pinned_memory(self.tiling, self.pinned_bytes, self.config.gradient_slabs)

    def estimate(self, plan: Plan, training: bool = True) -> Estimate:
        """Device bytes of a training step (or of an evaluation) under a plan, without the margin."""
        return (training_bytes if training else evaluation_bytes)(self.captured, self.tiling, plan, self.fused)

    def open_bytes(self, plan: Plan) -> int:
        """Device bytes of the activations that a forward without residuals leaves for its backward."""
        return training_moments(self.captured, self.tiling, plan, self.fused)["recompute"].checkpoints

    def too_small(self, batch: int, length: int, need: int, plan: Plan) -> NoFittingPlanError:
        """The error if the smallest plan, which needs `need` device bytes, does not fit the device or the host."""
        if need <= self.device_bytes:
            parts = " and ".join(f"{format_bytes(count)} of {what}" for what, count in self.host_parts(plan).items() if count)
            return NoFittingPlanError(
                f"a batch of {batch} x {length} needs {parts} in host memory, and {format_bytes(self.host_bytes_left)} are "
                "left after weights and optimizer state", "use fewer or shorter sequences, or a larger host_memory", need)
        slots = {"weight_slots": plan.weight_slots, "gradient_slots": plan.gradient_slots}
        single = "".join(f", {name}=1" for name, count in slots.items() if count == 1)
        return NoFittingPlanError(
            f"a batch of {batch} x {length} needs {format_bytes(need)} of device memory (micro-batches of "
            f"{plan.micro_batches[0]}, checkpoint_interval={plan.checkpoint_interval}"
            f"{f', token_chunk={plan.token_chunk}' if plan.token_chunk else ''}"
            f"{f', host_checkpoints={plan.host_checkpoints}' if plan.host_checkpoints else ''}"
            f"{single}) and "
            f"{format_bytes(self.device_bytes)} are available{self._others()}",
            f"use fewer or shorter sequences, or a larger device_memory{self.averaging()}", need)

    def averaging(self) -> str:
        """Another remedy, for a model whose batches only the user may split."""
        asked = self.config.micro_batch_size or not self.captured.is_averaged
        return "" if asked else ("\nor give micro_batch_size; then the auxiliary loss is the mean over micro-batches, as with "
                                 "gradient accumulation")

    def _others(self) -> str:
        taken = format_bytes(self.taken_bytes)
        return f" (other streamed models have planned {taken}: close() one)" if self.taken_bytes else ""
