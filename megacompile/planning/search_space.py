"""The plans that may be chosen for a batch, in order of preference.

A checkpoint interval K of 1 is fastest where it fits: its backward leaves the layer's last GEMM out of the recompute. A larger
K keeps fewer checkpoints, but also the residuals of K - 1 layers of one micro-batch. Where no K fits, as few checkpoints as
necessary wait in host memory. Where not even a micro-batch of one sequence fits, its tokens are computed in chunks, as large as
fit, with checkpoints on the device or else on the host; only attention needs all tokens at once. As the last resort gradients
get one slot, which costs little (a backward computes while the slot is copied to the host), and then weights too, which costs
more (no layer's weights arrive while another layer computes).
"""
from __future__ import annotations

import contextlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

from megacompile.errors import InsufficientMemoryError
from megacompile.ir.options import planned
from megacompile.ir.placement import LISTS_OF_UPDATED, Placement, Placements, Updated
from megacompile.ir.plan import FULL_TOKENS, STATE_SLABS, Plan, split
from megacompile.planning.memory import slab_bytes, slot_bytes, state_slab_bytes
from megacompile.planning.memory_budget import MemoryBudget, PinnedMemory
from megacompile.planning.step_time import StepSimulator
from megacompile.runtime.memory.tiles import TileLayout

#: Fewest tokens of a chunk. Smaller chunks leave kernels empty and read all weights too often.
LEAST_CHUNK = 2048
#: Fewest tokens of a wave. The kernels of a smaller one do not hide the transfer of weights.
WAVE_TOKENS = 12288
#: The largest batch that `largest_batch` looks for.
MOST_SEQUENCES = 1 << 14


@dataclass(frozen=True)
class SearchSpace(MemoryBudget):
    """The inputs of the choice of a plan: the model, the user's options, memory, rates, and what earlier plans fixed.

    `simulator`: of steps; None if the machine's rates are unknown, and rules of thumb decide. `stateful`: the tiles that
    earlier plans update on the device; None without an earlier plan. `output`: as in `BatchSpec`. `full_tokens`:
    the most tokens of a micro-batch of several sequences."""

    simulator: StepSimulator | None = None
    stateful: tuple[str, ...] | None = None
    output: str = "loss"
    full_tokens: int = FULL_TOKENS

    def with_fewer_slots(self) -> Iterator[Self]:
        """This search space, then fallbacks in case it has no plan: with one gradient slot, then also with only as many weight
        slots as blocks have layers. Numbers of slots that the user has given stay."""
        yield self
        lean = replace(self, config=replace(self.config, gradient_slots=self.config.gradient_slots or 1))
        if self.config.gradient_slots is None:
            yield lean
        if self.config.weight_slots is None:
            interval = self.config.checkpoint_interval or 1
            yield replace(lean, config=replace(lean.config, weight_slots=interval, checkpoint_interval=interval))

    def holds(self, batch: int, length: int, update: str = "step") -> bool:
        """True if a training step fits under any of the considered plans."""
        planners = [planner.with_state(0) for planner in self.with_fewer_slots()]
        return any(planner.fits(plan) for planner in reversed(planners)
                   for plan in reversed([*planner._candidates(batch, length, update)]))

    def with_state(self, count: int) -> Self:
        """This search space, with the first `count` trained tiles updated on the device."""
        return replace(self, stateful=self.in_memory()[:count])

    def in_memory(self) -> tuple[str, ...]:
        """The trained tiles that may stay on the device with their state: their moments are not on disk, and each rank has all
        of what an update reads."""
        layouts, ranks = self.tiling.layouts, self.tiling.ranks
        return tuple(tile for tile in self.trained()
                     if tile not in self.tiling.on_disk and not (ranks > 1 and layouts[tile].has_matrices))

    def trained(self) -> tuple[str, ...]:
        return tuple(tile for tile, layout in self.tiling.layouts.items() if layout.trainable)

    def plan(self, batch: int, length: int, training: bool = True, update: str = "step") -> Plan:
        """The preferred plan of a loop that fits. If none fits, raises `InsufficientMemoryError` with the smallest need."""
        smallest: tuple[int, Plan] | None = None
        for candidate in self._candidates(batch, length, update):
            need = self.estimate(candidate, training).total + self.margin_bytes
            if need <= self.device_bytes and (not training or self.fits_host(candidate)):
                return self._keep_residuals(candidate) if training and self.config.saved_layers is None else candidate
            if smallest is None or need < smallest[0]:
                smallest = need, candidate
        assert smallest is not None
        raise self.too_small(batch, length, *smallest)

    def considered(self, batch: int, length: int, update: str = "step", whole_step: bool = False) -> Iterator[Plan]:
        """Every plan of a training step that may be chosen, in order of preference, including some that do not fit. For a loop,
        each with as many residuals as fit, with only attention's results, and without residuals. For a whole step:
        `step_plans`."""
        if whole_step:
            yield from self.step_plans(batch, length, update)
            return
        for candidate in self._candidates(batch, length, update):
            if self.config.saved_layers is None and self.fits(candidate):
                yield from dict.fromkeys((*self.residuals_either_way(self._keep_residuals(candidate)), candidate))
            else:
                yield candidate

    def largest_batch(self, length: int, update: str = "step") -> int:
        """The most sequences of `length` tokens whose training step fits under any of the considered plans, at most
        `MOST_SEQUENCES`; 0 if none fits."""
        def too_large(batch: int) -> bool:
            return not self.holds(batch, length, update)

        limit = 1
        while limit <= MOST_SEQUENCES and not too_large(limit):
            limit *= 2
        return bisect_left(range(min(limit, MOST_SEQUENCES + 1)), True, lo=limit // 2 + 1, key=too_large) - 1

    def _candidates(self, batch: int, length: int, update: str = "step") -> Iterator[Plan]:
        """Plans of a loop, in order of preference: for each K from 1, large micro-batches (up to full kernels) first."""
        depth, config = len(self.layers), self.config
        sizes = [config.micro_batch_size] if config.micro_batch_size else self._sizes(batch, length)
        alone = config.residuals == "attention"  # a larger K needs all residuals of a block
        intervals = [config.checkpoint_interval or 1] if config.checkpoint_interval or alone else self._intervals(depth)
        # All weights of a block are on the device together.
        intervals = intervals if config.checkpoint_interval else [k for k in intervals if k <= (config.weight_slots or k)]
        for interval in intervals:
            for size in sizes:
                yield self._candidate(batch, length, update, size, interval, config.token_chunk or 0)
        yield from self._on_the_host(self._candidate(batch, length, update, size, intervals[0], config.token_chunk or 0)
                                     for size in sizes)
        if config.token_chunk is None and sizes[-1] == 1:
            # A larger K would keep the residuals of all tokens.
            chunked = [self._candidate(batch, length, update, 1, intervals[0], chunk) for chunk in self._chunks(length)]
            yield from chunked
            yield from self._on_the_host(chunked)

    def _on_the_host(self, plans: Iterable[Plan]) -> Iterator[Plan]:
        """The plans that do not fit with all their checkpoints on the device, with some of them on the host."""
        return (other for plan in plans if (other := self.fewest_on_the_host(plan)) != plan)

    def fewest_on_the_host(self, plan: Plan) -> Plan:
        """The plan with the fewest checkpoints in host memory with which it fits, or with all of them if it never fits."""
        boundaries = len(plan.blocks(self.layers)) - 1
        if self.config.host_checkpoints is not None or boundaries < 1 or self.fits_device(plan):
            return plan
        others = [replace(plan, host_checkpoints=count) for count in range(1, boundaries + 1)]
        return others[min(bisect_left(others, True, key=self.fits_device), boundaries - 1)]

    def _candidate(self, batch: int, length: int, update: str, size: int, interval: int, chunk: int) -> Plan:
        config, depth, pinned = self.config, len(self.layers), self.pinned()
        most = max(0, depth - 1)
        wanted = most if config.host_checkpoints is True else min(config.host_checkpoints or 0, most)
        slots = config.weight_slots or min(len(self.captured.calls) - 2, max(2, interval + 1))
        return Plan(
            batch, length, split(batch, min(size, batch)), interval, min(config.saved_layers or 0, depth), slots,
            placements=self._placements(update), pinned=pinned.tiles, staging_slabs=pinned.staging_slabs,
            gradient_slabs=self._slabs(pinned, update), update=update, token_chunk=chunk, host_checkpoints=wanted,
            output=self.output, deferred_moments=config.defers(update), **planned(config),
            ranks=self.tiling.ranks, hosts=self.tiling.hosts, spread=self.tiling.spread,
            state_slabs=self._state_slabs(update))

    def _state_slabs(self, update: str) -> int:
        """The number of slabs for moments on disk: the usual one, or as many as the host holds beside gradients."""
        if update == "step":
            gradients = self.tiling.host_parts()["gradients"]
        else:
            gradients = slab_bytes(self.tiling, 1, self.resident_state()) * self.tiling.ranks_here
        fitting = (count for count in range(STATE_SLABS, 1, -1)
                   if gradients + state_slab_bytes(self.tiling, count) <= self.host_bytes_left)
        return self.config.state_slabs or next(fitting, 1)

    def _slabs(self, pinned: PinnedMemory, update: str) -> int:
        """The number of slabs for gradients: with updates on arrival only as many as the host holds."""
        if update == "step" or not pinned.tiles:
            return pinned.gradient_slabs
        budget_bytes = self.host_bytes_left - state_slab_bytes(self.tiling, self._state_slabs(update))
        fitting = (count for count in range(pinned.gradient_slabs, 1, -1) if slab_bytes(
            self.tiling, count, self.resident_state()) * self.tiling.ranks_here <= budget_bytes)
        return next(fitting, 1)

    def plan_step(self, batch: int, length: int, update: str) -> Plan:
        """The plan of a whole step by rules of thumb: the fewest waves that let every layer keep its residuals, if memory
        allows it, with gradients added up on the device. Then nothing is recomputed, and each additional wave copies the
        weights once more, but no gradients."""
        plans = self.step_plans(batch, length, update)
        return next((p for p in plans if p.saved_layers == len(self.layers) and self.fits(p)
                     and (self.config.host_sums is not None or not p.host_sums)), plans[0])

    def step_plans(self, batch: int, length: int, update: str) -> list[Plan]:
        """Plans of a whole step that fit, for each number of waves from 1 on, with as many residuals as fit. Raises
        `InsufficientMemoryError` if none fits."""
        config = self.config
        plan, fewest = self._least_in_waves(batch, length, update)
        if (named := config.held_state) is not None:
            plan = plan.placed(Updated.HELD, [tile for tile in self.may_be_held(plan) if named == "all" or tile in named])
        count = len(plan.micro_batches)
        plan = replace(plan, waves=min(config.waves or fewest, count))
        if config.host_checkpoints is None:
            plan = replace(plan, host_checkpoints=0)  # waves may need fewer
        if config.saved_layers is not None or not self.keep_residuals:
            plan = replace(plan, saved_layers=min(config.saved_layers or 0, len(self.layers)))
            return [self._fitting(self.fewest_on_the_host(self._fewest_sums(plan)), batch, length)]
        most = max(fewest, min(count, batch * length // WAVE_TOKENS))
        # Of several numbers of waves whose largest wave has as many micro-batches, the least.
        waves = [plan.waves] if config.waves else sorted({-(-count // n): n for n in range(most, fewest - 1, -1)}.values())
        found = [each for n in waves for each in dict.fromkeys(self._in_waves(replace(plan, waves=n)))]
        return [each for each in found if self.fits(each)] or [self._fitting(found[0], batch, length)]

    def _least_in_waves(self, batch: int, length: int, update: str) -> tuple[Plan, int]:
        """The preferred plan of one wave without residuals, since more of them fit with several waves than with one, and 1. If
        the checkpoints of the batch do not fit, the plan with micro-batches of the largest part of it that fits (a half, a
        quarter, ...), and the number of parts."""
        space = replace(self, config=replace(self.config, saved_layers=0))
        try:
            return space.plan(batch, length, update=update), 1
        except InsufficientMemoryError:
            halved = [1 << n for n in range(1, batch.bit_length())] if self.splits(self.output) else []
            for count in [self.config.waves] if self.config.waves else halved:
                with contextlib.suppress(InsufficientMemoryError):
                    part = space.plan(-(-batch // count), length, update=update)
                    return replace(part, batch=batch, micro_batches=split(batch, part.micro_batches[0])), count
            raise

    def may_be_held(self, plan: Plan) -> list[str]:
        """The tiles that the device may hold for their update: those that the host would update, in the order of the next
        forward. A step that failed can be completed only if moments can be updated after weights."""
        if plan.update != "step" or plan.processes > 1:
            return []
        layouts = self.tiling.layouts
        return [tile for tile in self.in_memory() if plan.placement(tile).updated in (Updated.ON_HOST, Updated.HELD)
                and not layouts[tile].has_matrices and all(each.separable for each in layouts[tile].state_layout.states)]

    def _in_waves(self, plan: Plan) -> Iterator[Plan]:
        """The plan with all accumulators on the device, if they fit, and then as many residuals as fit. For several waves also
        the plan with as many residuals as fit, and then as many accumulators on the device as fit. (Without residuals waves
        gain nothing.)"""
        budget_bytes = self.device_bytes - self.margin_bytes
        there = self._fewest_sums(plan)
        if not there.host_sums:
            most = self._most_residuals(self.fewest_on_the_host(there), budget_bytes)
            yield from self.residuals_either_way(most, budget_bytes)
        if plan.waves > 1 and (sums := self._sums()):
            summed = plan.placed(Updated.FROM_HOST_SUMS, sums)
            yield self._fewest_sums(self._most_residuals(self.fewest_on_the_host(summed), budget_bytes))

    def _fewest_sums(self, plan: Plan) -> Plan:
        """The plan with the fewest tiles added up on the host between waves with which it fits the device, or with all of
        `_sums`."""
        tiles = self._sums()
        if plan.waves == 1 or not tiles:
            return plan

        def summed(count: int) -> Plan:
            return plan.placed(Updated.FROM_HOST_SUMS, tiles[:count])

        if self.config.host_sums is not None:
            return summed(len(tiles))
        if self.fits_device(summed(0)):
            return summed(0)
        # With any tile on the host, a block also has one wave's accumulators for K layers at once: need falls only from there
        # on.
        fewest = bisect_left(range(len(tiles) + 1), True, lo=1, key=lambda count: self.fits_device(summed(count)))
        return summed(min(fewest, len(tiles)))

    def _sums(self) -> tuple[str, ...]:
        """The tiles that may be added up on the host, in the order in which their gradients arrive: as many as fit host memory,
        or those that the user has named."""
        named, placements = self.config.host_sums, self._placements("step")
        tiles = [tile for tile in reversed(self.trained()) if placements.of(tile).updated is Updated.ON_HOST]
        if named is not None:
            return tuple(tile for tile in tiles if named == "all" or tile in named)
        budget_bytes, held = self.host_bytes_left, accumulate(self.tiling.layouts[tile].sum_bytes for tile in tiles)
        return tuple(tile for tile, size in zip(tiles, held, strict=True) if size <= budget_bytes)

    def _fitting(self, plan: Plan, batch: int, length: int) -> Plan:
        """The plan, if it fits. Raises `InsufficientMemoryError`."""
        if not self.fits(plan):
            raise self.too_small(batch, length, self.estimate(plan).total + self.margin_bytes, plan)
        return plan

    def _keep_residuals(self, plan: Plan) -> Plan:
        """Spends unused memory on residuals of the last layers, each of which saves one forward in the backward. Leaves room
        for a second open forward without residuals."""
        if not self.keep_residuals:
            return plan
        return self._most_residuals(plan)

    def _bytes_for_residuals(self, plan: Plan) -> int:
        """Device bytes for a loop's step beside a second open forward, which takes its checkpoints and the slots that only they
        need."""
        lean = replace(plan, saved_layers=0)
        slots, fewer = (slot_bytes(self.captured, self.tiling, each) for each in (
            lean, replace(plan, saved_layers=len(self.layers))))
        return self.device_bytes - self.margin_bytes - self.open_bytes(lean) - max(0, slots - fewer)

    def residuals_either_way(self, plan: Plan, budget_bytes: int | None = None) -> list[Plan]:
        """A plan that keeps as many residuals as fit, and, if not all layers keep all residuals, plans that keep only
        attention's results: in as many layers as then fit beside the checkpoints, and with all checkpoints on the host. Only a
        simulation can tell which is fastest. Without known rates the list has only the given plan."""
        config, depth = self.config, len(self.layers)
        if (self.simulator is None or config.residuals is not None or config.saved_layers is not None or not self.keep_residuals
                or not self.captured.fused_attention or plan.checkpoint_interval > 1 or plan.saved_layers == depth):
            return [plan]
        kept = [self._most_residuals(replace(plan, residuals="attention"), budget_bytes)]
        if config.host_checkpoints is None and kept[0].saved_layers < depth:
            kept.append(self._most_residuals(replace(kept[0], host_checkpoints=depth - 1), budget_bytes))
        return [plan, *(each for each in kept if each.saved_layers)]

    def _most_residuals(self, plan: Plan, budget_bytes: int | None = None) -> Plan:
        """The plan with residuals in as many layers as fit in `budget_bytes` (None: a loop's `_bytes_for_residuals`)."""

        def need(saved: int) -> int:
            return self.estimate(replace(plan, saved_layers=saved)).total

        there = self._bytes_for_residuals(plan) if budget_bytes is None else budget_bytes
        saved = bisect_right(range(len(self.layers) + 1), there, key=need) - 1
        return replace(plan, saved_layers=max(0, saved))

    def splits(self, output: str) -> bool:
        """True if the planner may split a batch into micro-batches. It may not if that changes the loss, because the loss is
        not a sum over tokens or rows are computed together. Then only the user may split it (`micro_batch_size`)."""
        whole = not self.captured.has_loss_denominator or self.captured.is_averaged
        return not self.captured.across_rows and not (output == "loss" and whole)

    def _sizes(self, batch: int, length: int) -> list[int]:
        if not self.splits(self.output):
            return [batch]
        largest = max(1, min(batch, self.full_tokens // length))
        sizes = [largest]
        while sizes[-1] > 1:
            sizes.append(sizes[-1] // 2)
        return sizes

    @staticmethod
    def _chunks(length: int) -> list[int]:
        """Sizes of token chunks: powers of two below `length`, the largest first."""
        return [size for size in (1 << n for n in range(30, 0, -1)) if LEAST_CHUNK <= size <= FULL_TOKENS and size < length]

    @staticmethod
    def _intervals(depth: int) -> list[int]:
        intervals = [1]
        while intervals[-1] * 2 <= max(1, int(depth ** 0.5) + 1):
            intervals.append(intervals[-1] * 2)
        return intervals

    def resident_state(self) -> tuple[str, ...]:
        """The tiles that are updated on the device: those that the user has named, or else `stateful`."""
        named = self.config.resident_state
        if named is None:
            return self.stateful or ()
        chosen = self._unplaced_elsewhere("resident_state") if named == "all" else named
        return tuple(tile for tile in self.in_memory() if tile in chosen)

    def _unplaced_elsewhere(self, option: str) -> set[str]:
        """The tiles that "all" means for an option: those that no other option places."""
        named = (getattr(self.config, other) for other in LISTS_OF_UPDATED if other != option)
        return set(self.tiling.layouts).difference(*(tiles for tiles in named if tiles not in ("all", None)))

    def _placements(self, update: str) -> Placements:
        """The placements by the user's options and `stateful`, without host sums, which depend on waves. Tiles that are updated
        by whole matrices visit the device. With updates on arrival no tile visits it."""
        there, stay, named = set(self.resident_state()), self.config.resident, self.config.visiting_state or ()
        visiting = self._unplaced_elsewhere("visiting_state") if named == "all" else named

        def updated(layout: TileLayout) -> Updated:
            if layout.name in self.tiling.on_disk:
                return Updated.FROM_DISK
            if layout.name in there:
                return Updated.ON_DEVICE
            visits = layout.name in visiting or layout.has_matrices
            return Updated.VISITING if update == "step" and layout.trainable and visits else Updated.ON_HOST

        return Placements({tile: Placement(updated(layout), stay == "all" or tile in stay)
                           for tile, layout in self.tiling.layouts.items()})
