"""Chooses a plan: the largest micro-batch and the smallest checkpoint interval that fit the device (first cost model).

K = 1 is the fastest where it fits: its backward drops the layer's last GEMM from the recompute. A larger K keeps fewer
checkpoints and pays with the residuals of K - 1 layers of one micro-batch.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megacompile import cost
from megacompile.config import StreamConfig, parse_bytes
from megacompile.errors import InsufficientMemoryError
from megacompile.frontend.capture import CapturedModel
from megacompile.plan import Plan, split
from megacompile.tiling import Tiling

#: Sequences' worth of tokens beyond which a larger micro-batch is no faster: kernels are full by then.
FULL_TOKENS = 16384
#: Device memory that no estimate knows: CUDA's context, cuBLAS workspaces, rounding by the allocator.
MARGIN_BYTES = 1 << 30


@dataclass(frozen=True)
class Estimate:
    """Device bytes of a plan, by purpose."""

    slots: int
    accumulators: int
    checkpoints: int
    workspace: int

    @property
    def total(self) -> int:
        return self.slots + self.accumulators + self.checkpoints + self.workspace


@dataclass
class Planner:
    captured: CapturedModel
    tiling: Tiling
    config: StreamConfig
    device_bytes: int  # the budget
    locked_bytes: int | None = None  # budget of page-locked memory; None: no limit
    margin_bytes: int = MARGIN_BYTES

    def plan(self, batch: int, length: int, training: bool = True) -> Plan:
        """The best plan that fits. Raises `InsufficientMemoryError` with the smallest need if none does."""
        smallest: tuple[int, Plan] | None = None
        for candidate in self._candidates(batch, length):
            need = self.estimate(candidate, length, training).total + self.margin_bytes
            if need <= self.device_bytes:
                return candidate
            if smallest is None or need < smallest[0]:
                smallest = need, candidate
        assert smallest is not None
        raise InsufficientMemoryError(
            f"a batch of {batch} x {length} needs {smallest[0] / 2**30:.2f} GiB of device memory (micro-batches of "
            f"{smallest[1].micro_batches[0]}, checkpoint_interval={smallest[1].checkpoint_interval}) and "
            f"{self.device_bytes / 2**30:.2f} GiB are available: use fewer or shorter sequences, or a larger device_memory")

    def _candidates(self, batch: int, length: int) -> Iterator[Plan]:
        """In the order of preference: large micro-batches (up to full kernels) first, for each K from 1."""
        depth = len(self.captured.layer_names)
        config = self.config
        sizes = [config.micro_batch_size] if config.micro_batch_size else self._sizes(batch, length)
        intervals = [config.checkpoint_interval] if config.checkpoint_interval else self._intervals(depth)
        for interval in intervals:
            for size in sizes:
                slots = config.weight_slots or min(depth, max(2, interval + 1))
                yield Plan(
                    batch, length, split(batch, min(size, batch)), interval, min(config.saved_layers, depth), slots,
                    config.gradient_slots, self.resident(), self.locked(), 2, config.gradient_slabs)

    def _sizes(self, batch: int, length: int) -> list[int]:
        if not self.captured.has_normaliser:
            return [batch]  # a loss that is no sum over tokens cannot be split
        largest = max(1, min(batch, FULL_TOKENS // length))
        sizes = [largest]
        while sizes[-1] > 1:
            sizes.append(sizes[-1] // 2)
        return sizes

    @staticmethod
    def _intervals(depth: int) -> list[int]:
        intervals = [1]
        while intervals[-1] * 2 <= max(1, int(depth ** 0.5) + 1):
            intervals.append(intervals[-1] * 2)
        return intervals

    def resident(self) -> tuple[str, ...]:
        return tuple(self.tiling.layouts) if self.config.resident == "all" else tuple(self.config.resident)

    def locked(self) -> bool:
        """Whether the tiles' own weights and gradients may be page-locked."""
        if self.locked_bytes is None:
            return True
        return sum(x.weight_bytes + x.gradient_bytes for x in self.tiling.layouts.values()) <= self.locked_bytes

    def estimate(self, plan: Plan, length: int, training: bool = True) -> Estimate:
        """Device bytes of a training step (or of an evaluation) under a plan."""
        captured, layouts = self.captured, self.tiling.layouts
        calls, templates = captured.calls, captured.templates
        layer_calls = calls[1:-1]
        border = {t for c in (calls[0], calls[-1]) for t in self.tiling.tiles_of[c.name]}
        layer_tiles = [layouts[t] for c in layer_calls for t in self.tiling.tiles_of[c.name] if t not in border]
        largest = max(x.weight_bytes for x in layer_tiles)
        at_once = max(sum(layouts[t].weight_bytes for t in self.tiling.tiles_of[c.name]) for c in (calls[0], calls[-1]))
        slots = plan.weight_slots * largest + at_once + sum(layouts[t].weight_bytes for t in plan.resident)
        mb = plan.micro_batches[0]
        templates_used = {c.template: templates[c.template] for c in layer_calls}
        if not training:
            work = max(cost.peak_bytes(t, t.variant("forward"), mb, length) for t in templates_used.values())
            logits = cost.peak_bytes(templates["epilogue"], templates["epilogue"].variant("evaluate"), mb, length)
            hidden = sum(cost.output_bytes(templates[calls[0].template], b, length) for b in plan.micro_batches)
            return Estimate(slots, 0, 3 * hidden, max(work, logits))
        trained = [x.gradient_bytes for x in layer_tiles if x.trainable]
        slots += plan.gradient_slots * max(trained, default=0) + max(layouts[t].gradient_bytes for t in border)
        elements = max((x.elements for x in layer_tiles if x.trainable), default=0)
        epilogue = sum(layouts[t].elements for t in self.tiling.tiles_of[calls[-1].name] if layouts[t].trainable)
        prologue = sum(layouts[t].elements for t in self.tiling.tiles_of[calls[0].name] if layouts[t].trainable)
        block = plan.checkpoint_interval
        accumulators = 4 * max(epilogue + block * elements, prologue)

        # Activations that outlive an op: checkpoints of every block, the shared outputs, the loss's gradients.
        blocks = -(-(len(layer_calls) - plan.saved_layers) // block)
        layer = next(iter(templates_used.values()))
        hidden = sum(cost.output_bytes(layer, b, length) for b in plan.micro_batches)
        shared = sum(cost.output_bytes(templates[calls[0].template], b, length) for b in plan.micro_batches)
        saved = plan.saved_layers * sum(cost.residual_bytes(layer, b, length) for b in plan.micro_batches)
        checkpoints = (max(0, blocks - 1) + 2) * hidden + shared + saved
        one = max(cost.residual_bytes(t, mb, length) + cost.output_bytes(t, mb, length) for t in templates_used.values())
        work = max(cost.peak_bytes(t, t.variant("recompute_backward"), mb, length) for t in templates_used.values())
        border_work = max(
            cost.peak_bytes(templates["epilogue"], templates["epilogue"].variant("loss"), mb, length),
            cost.peak_bytes(templates["prologue"], templates["prologue"].variant("recompute_backward"), mb, length))
        return Estimate(slots, accumulators, checkpoints, max((block - 1) * one + work, border_work))
