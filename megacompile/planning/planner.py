"""Chooses a plan: the largest micro-batch and the smallest checkpoint interval that fit the device; then, where memory is
left, waves, layers that keep residuals (all, or attention's results alone) and tiles that are updated on the device, whichever
is fastest when simulated.

K = 1 is the fastest where it fits: its backward drops the layer's last GEMM from the recompute. A larger K keeps fewer
checkpoints and pays with the residuals of K - 1 layers of one micro-batch. Where no K fits, checkpoints wait in host memory, as
few as need to. Where not even a micro-batch of one sequence fits then, its tokens are computed in chunks, as large as fit, with
checkpoints on the device or else on the host: attention alone needs all tokens at once. Where nothing of this fits, gradients
have one slot, which costs little (a backward computes while the slot is sent home), and then weights too, which costs more: no
layer's weights arrive while another is computed.
"""
from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from megacompile.errors import InsufficientMemoryError, NoFittingPlanError
from megacompile.ir.plan import FULL_TOKENS, Plan, split
from megacompile.planning import kept_plans
from megacompile.planning.device_update_plan import most_helpful_visits, named_visits
from megacompile.planning.memory_budget import Room
from megacompile.planning.plan_questions import free_memory, question
from megacompile.planning.remedies import explained
from megacompile.planning.step_time import Pace

#: Of a chunk of tokens: fewer leave kernels empty, and read all weights too often.
LEAST_CHUNK = 2048
#: Tokens of a wave below which its kernels no longer hide the weights' arrival.
WAVE_TOKENS = 12288
#: No larger batch is of interest.
MOST_SEQUENCES = 1 << 14
#: A plan must be so much faster to be taken instead of one that computes less: simulations are not exact.
WORTH = 1.003


@dataclass
class Planner(Room):
    pace: Pace | None = None  # None: nothing is known of the machine, and rules of thumb decide
    stateful: tuple[str, ...] | None = None  # tiles that are updated on the device; None: not chosen yet
    output: str = "loss"  # of the plans (see `Shape`)
    keeping: bool = False  # plans are kept on disk, and found there
    answers: Counter[str] = field(default_factory=Counter)  # how many plans of steps were "searched", how many "kept"

    def choose(self, batch: int, length: int, training: bool = True, update: str = "step",
               whole_step: bool = False, output: str = "loss") -> Plan:
        """The fastest plan that fits, for a loop or for a whole step as one program, that updates at "step" or on "arrival".
        What the first training step updates on the device all later plans do too, or less where they must: moving optimizer
        state takes longer than any of them would gain.

        Raises as `plan`."""
        if output != self.output:
            other = replace(self, output=output)
            chosen = other.choose(batch, length, training, update, whole_step, output)
            self.stateful = other.stateful
            return chosen
        asked = question(self, batch, length, update, whole_step) if self.keeping and training else None
        kept = kept_plans.find(asked, free_memory(self)) if asked is not None else None
        if kept is not None and self._accepts(kept, batch, length, update):
            chosen = kept
            self.answers["kept"] += 1
        else:
            chosen = self._search(batch, length, training, update, whole_step)
            self.answers["searched"] += training
            if asked is not None:
                kept_plans.keep(asked, free_memory(self), chosen)
        if training or self.stateful is not None:
            self.stateful = chosen.resident_state
        return chosen

    def _accepts(self, kept: Plan, batch: int, length: int, update: str) -> bool:
        """Whether a plan from the disk is one of this step, and fits."""
        asked = batch, length, update, self.output
        named = {*kept.resident, *kept.update_order, *kept.host_sums, *kept.visiting_state}
        return (asked == (kept.batch, kept.length, kept.update, kept.output) and named <= self.tiling.layouts.keys()
                and self.fits(kept))

    def _search(self, batch: int, length: int, training: bool, update: str, whole_step: bool) -> Plan:
        """The fastest plan under as many slots as fit. Raises as `plan`, with what would fit."""
        refusals: list[NoFittingPlanError] = []
        for planner in self._with_fewer_slots():
            try:
                return planner._chosen(batch, length, training, update, whole_step)
            except NoFittingPlanError as error:
                refusals.append(error)
        raise explained(self, batch, length, training, min(refusals, key=lambda error: error.need))

    def _with_fewer_slots(self) -> Iterator[Planner]:
        """This planner, and others for where it finds no plan: with one gradient slot, then with as few weight slots as blocks
        have layers. Slots that the user has named stay."""
        yield self
        lean = replace(self, config=replace(self.config, gradient_slots=self.config.gradient_slots or 1))
        if self.config.gradient_slots is None:
            yield lean
        if self.config.weight_slots is None:
            interval = self.config.checkpoint_interval or 1
            yield replace(lean, config=replace(lean.config, weight_slots=interval, checkpoint_interval=interval))

    def holds(self, batch: int, length: int) -> bool:
        """Whether a training step fits, under any of the plans that are tried."""
        planners = [planner._with_state(0) for planner in self._with_fewer_slots()]
        return any(planner.fits(plan) for planner in reversed(planners)
                   for plan in reversed([*planner._candidates(batch, length)]))

    def _chosen(self, batch: int, length: int, training: bool, update: str, whole_step: bool) -> Plan:
        counts = self._state_counts(training)
        if self.pace is None or not training or not self.keep_residuals:
            for count in counts:  # the most that fits
                try:
                    planner = self._with_state(count)
                    return (planner.plan_step(batch, length, update) if whole_step
                            else planner.plan(batch, length, training, update))
                except InsufficientMemoryError:
                    if count == counts[-1]:
                        raise
        assert self.pace is not None, "some number of tiles was tried, and all of them were refused"
        return self._fastest(batch, length, update, whole_step, counts, self.pace)

    def _fastest(self, batch: int, length: int, update: str, whole_step: bool, counts: Sequence[int], pace: Pace) -> Plan:
        """Simulates plans, those first that may be the fastest, as long as one may yet be faster than the best so far: with a
        host that is slower than its rates say. Of plans that are nearly as fast, the one that computes least is taken."""
        found = self._with_each_state(batch, length, update, whole_step, counts)
        may_defer = self.config.deferred_moments is None
        orders: dict[Plan, list[Plan]] = {}
        fastest = float("inf")
        for bound, plan in sorted(((pace.at_least(plan, may_defer), plan) for plan in found), key=lambda pair: pair[0]):
            if bound * WORTH >= fastest:
                break
            orders[plan] = pace.orders(plan, whole_step, may_defer)
            fastest = min(fastest, *(pace.cautious_s(variant, whole_step) for variant in orders[plan]))
        tried = sorted((plan for plan in found if plan in orders), key=pace.compute_s)
        best, *others = (variant for plan in tried for variant in orders[plan])
        for variant in others:
            if pace.cautious_s(variant, whole_step) * WORTH < pace.cautious_s(best, whole_step):
                best = variant
        if self.config.visiting_state is not None or self.pinned_bytes is not None:  # visiting state takes pinned memory
            return best
        return most_helpful_visits(best, self._trained(), pace, whole_step, WORTH, self._fewest_on_the_host, self.fits)

    def _with_each_state(self, batch: int, length: int, update: str, whole_step: bool, counts: Sequence[int]) -> list[Plan]:
        """Plans that fit, for each number of tiles that the device updates. Raises `InsufficientMemoryError` if none does."""
        found: dict[Plan, None] = {}
        refusal: InsufficientMemoryError | None = None
        for count in counts:
            try:
                planner = self._with_state(count)
                plans = (planner._step_plans(batch, length, update) if whole_step
                         else planner._residuals_either_way(planner.plan(batch, length, update=update)))
            except InsufficientMemoryError as error:
                refusal = error if count == min(counts) else refusal  # its plans need least
                continue
            found |= dict.fromkeys(plan for plan in plans if self.fits(plan))
        if refusal is not None and not found:
            raise refusal
        return list(found)

    def _with_state(self, count: int) -> Planner:
        """This planner, with the first so many trained tiles updated on the device."""
        return replace(self, stateful=self._trained()[:count])

    def _trained(self) -> tuple[str, ...]:
        return tuple(tile for tile, layout in self.tiling.layouts.items() if layout.trainable)

    def _state_counts(self, training: bool) -> list[int]:
        """How many tiles the device may update, the preferred number first."""
        if self.config.resident_state is not None:
            return [0]  # those that the user has named, whatever the number
        if self.stateful is not None:
            return list(range(len(self.stateful), -1, -1))
        if not training or not self.keep_residuals or self.pace is None:
            return [0]
        trained = len(self._trained())
        return sorted({0, 1, trained, *range(2, trained, max(1, trained // 12))})

    def plan(self, batch: int, length: int, training: bool = True, update: str = "step") -> Plan:
        """The best plan of a loop that fits. Raises `InsufficientMemoryError` with the smallest need if none does."""
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
        """Every plan of a training step that the choice may fall on, in the order of preference: each with the residuals that
        memory is left for, with attention's alone, and without. Some do not fit. Of a whole step: those of `_step_plans`."""
        if whole_step:
            yield from self._step_plans(batch, length, update)
            return
        for candidate in self._candidates(batch, length, update):
            if self.config.saved_layers is None and self.fits(candidate):
                yield from dict.fromkeys((*self._residuals_either_way(self._keep_residuals(candidate)), candidate))
            else:
                yield candidate

    def largest_batch(self, length: int) -> int:
        """The most sequences of which a training step fits, under any of the plans that are considered; 0 if none does, and
        `MOST_SEQUENCES` at most."""
        def too_large(batch: int) -> bool:
            return not self.holds(batch, length)

        limit = 1
        while limit <= MOST_SEQUENCES and not too_large(limit):
            limit *= 2
        return bisect_left(range(min(limit, MOST_SEQUENCES + 1)), True, lo=limit // 2 + 1, key=too_large) - 1

    def _candidates(self, batch: int, length: int, update: str = "step") -> Iterator[Plan]:
        """Plans of a loop, in the order of preference: large micro-batches (up to full kernels) first, for each K from 1."""
        depth, config = len(self.layers), self.config
        sizes = [config.micro_batch_size] if config.micro_batch_size else self._sizes(batch, length)
        alone = config.residuals == "attention"  # a larger K keeps all residuals for a while
        intervals = [config.checkpoint_interval or 1] if config.checkpoint_interval or alone else self._intervals(depth)
        # A block's weights are there together.
        intervals = intervals if config.checkpoint_interval else [k for k in intervals if k <= (config.weight_slots or k)]
        for interval in intervals:
            for size in sizes:
                yield self._candidate(batch, length, update, size, interval, config.token_chunk or 0)
        yield from self._on_the_host(self._candidate(batch, length, update, size, intervals[0], config.token_chunk or 0)
                                     for size in sizes)
        if config.token_chunk is None and sizes[-1] == 1:
            # A larger K would keep residuals, which are of all tokens.
            chunked = [self._candidate(batch, length, update, 1, intervals[0], chunk) for chunk in self._chunks(length)]
            yield from chunked
            yield from self._on_the_host(chunked)

    def _on_the_host(self, plans: Iterable[Plan]) -> Iterator[Plan]:
        """Those that do not fit with all their checkpoints on the device, with fewer there."""
        return (other for plan in plans if (other := self._fewest_on_the_host(plan)) != plan)

    def _fewest_on_the_host(self, plan: Plan) -> Plan:
        """The plan, with as few checkpoints in host memory as let it fit, or all if none do."""
        borders = len(plan.blocks(self.layers)) - 1
        if self.config.host_checkpoints is not None or borders < 1 or self.fits_device(plan):
            return plan
        others = [replace(plan, host_checkpoints=count) for count in range(1, borders + 1)]
        return others[min(bisect_left(others, True, key=self.fits_device), borders - 1)]

    def _candidate(self, batch: int, length: int, update: str, size: int, interval: int, chunk: int) -> Plan:
        config, depth, pinned = self.config, len(self.layers), self.pinned()
        most = max(0, depth - 1)
        wanted = most if config.host_checkpoints is True else min(config.host_checkpoints or 0, most)
        slots = config.weight_slots or min(len(self.captured.calls) - 2, max(2, interval + 1))
        return Plan(
            batch, length, split(batch, min(size, batch)), interval, min(config.saved_layers or 0, depth), slots,
            config.gradient_slots or 2, self.resident(), self.resident_state(), pinned.tiles, pinned.staging_slabs,
            pinned.gradient_slabs, update=update, token_chunk=chunk, host_checkpoints=wanted, output=self.output,
            visiting_state=self._visiting(update), deferred_moments=config.defers(update), residuals=config.residuals or "all")

    def plan_step(self, batch: int, length: int, update: str) -> Plan:
        """The plan of a whole step. Where memory allows it, the fewest waves that let every layer keep its residuals: then
        nothing is recomputed, and the link carries the weights once more for each further wave. Gradients, which it would carry
        too, are added up on the device."""
        plans = self._step_plans(batch, length, update)
        return next((p for p in plans if p.saved_layers == len(self.layers) and self.fits(p)
                     and (self.config.host_sums is not None or not p.host_sums)), plans[0])

    def _step_plans(self, batch: int, length: int, update: str) -> list[Plan]:
        """From one wave on, each with as many residuals as fit."""
        config = self.config
        # In waves more residuals fit than in one: the plan begins without any.
        plan = replace(replace(self, config=replace(config, saved_layers=0)).plan(batch, length), update=update,
                       visiting_state=self._visiting(update), deferred_moments=config.defers(update))
        count = len(plan.micro_batches)
        if config.waves is not None:
            plan = replace(plan, waves=min(config.waves, count))
        if config.host_checkpoints is None:
            plan = replace(plan, host_checkpoints=0)  # waves may need fewer
        if config.saved_layers is not None or not self.keep_residuals:
            plan = replace(plan, saved_layers=min(config.saved_layers or 0, len(self.layers)))
            return [self._fitting(self._fewest_on_the_host(self._fewest_sums(plan)), batch, length)]
        waves = [plan.waves] if config.waves else range(1, max(1, min(count, batch * length // WAVE_TOKENS)) + 1)
        found = [each for n in waves for each in dict.fromkeys(self._in_waves(replace(plan, waves=n)))]
        return [each for each in found if self.fits(each)] or [self._fitting(found[0], batch, length)]

    def _in_waves(self, plan: Plan) -> Iterator[Plan]:
        """The plan with as many residuals as fit beside all accumulators, if these fit; of several waves also with as many
        residuals as fit, and then with as many accumulators on the device. (Without residuals waves gain nothing.)"""
        room = self.device_bytes - self.margin_bytes
        there = self._fewest_sums(plan)
        if not there.host_sums:
            yield from self._residuals_either_way(self._most_residuals(self._fewest_on_the_host(there), room), room)
        if plan.waves > 1 and (sums := self._sums()):
            yield self._fewest_sums(self._most_residuals(self._fewest_on_the_host(replace(plan, host_sums=sums)), room))

    def _fewest_sums(self, plan: Plan) -> Plan:
        """The plan, with as few tiles added up on the host between waves as let it fit the device, or all of `_sums`."""
        tiles = self._sums()
        if plan.waves == 1 or not tiles:
            return plan
        plans = [replace(plan, host_sums=tiles[:count]) for count in range(len(tiles) + 1)]
        if self.config.host_sums is not None:
            return plans[-1]
        if self.fits_device(plans[0]):
            return plans[0]
        # From one tile on: blocks have accumulators of a wave for K layers at once, however few tiles are on the host.
        return plans[min(bisect_left(plans, True, lo=1, key=self.fits_device), len(tiles))]

    def _sums(self) -> tuple[str, ...]:
        """Tiles that may be added up on the host, those whose gradients come first at the front: as many as the host has room
        for, or those that the user has named."""
        named, there = self.config.host_sums, {*self.resident_state(), *self._visiting("step")}
        tiles = [tile for tile in reversed(self._trained()) if tile not in there]
        if named is not None:
            return tuple(tile for tile in tiles if named == "all" or tile in named)
        room, held = self.host_room, accumulate(self.tiling.layouts[tile].sum_bytes for tile in tiles)
        return tuple(tile for tile, size in zip(tiles, held, strict=True) if size <= room)

    def _fitting(self, plan: Plan, batch: int, length: int) -> Plan:
        """The plan, if it fits. Raises `InsufficientMemoryError`."""
        if not self.fits(plan):
            raise self.too_small(batch, length, self.estimate(plan).total + self.margin_bytes, plan)
        return plan

    def _keep_residuals(self, plan: Plan) -> Plan:
        """Spends what memory is left on residuals of the last layers: each is one forward less in the backward, the only
        large lever there is on the step time. Leaves room for a second open forward that keeps none."""
        if not self.keep_residuals:
            return plan
        return self._most_residuals(plan)

    def _room_for_residuals(self, plan: Plan) -> int:
        """Device bytes for a loop's step, beside a second open forward: its checkpoints, and slots that these alone pass
        through."""
        lean, full = (self.estimate(replace(plan, saved_layers=saved)) for saved in (0, len(self.layers)))
        return self.device_bytes - self.margin_bytes - lean.checkpoints - max(0, lean.slots - full.slots)

    def _residuals_either_way(self, plan: Plan, room: int | None = None) -> list[Plan]:
        """A plan that keeps as many residuals as there is room for; and, if these are not all of all layers, plans that keep
        those of attention alone, of as many layers as then fit beside the checkpoints, or with all these on the host. Which is
        fastest, a simulation has to say: none is offered without one."""
        config, depth = self.config, len(self.layers)
        if (self.pace is None or config.residuals is not None or config.saved_layers is not None or not self.keep_residuals
                or not self.captured.fused_attention or plan.checkpoint_interval > 1 or plan.saved_layers == depth):
            return [plan]
        kept = [self._most_residuals(replace(plan, residuals="attention"), room)]
        if config.host_checkpoints is None and kept[0].saved_layers < depth:
            kept.append(self._most_residuals(replace(kept[0], host_checkpoints=depth - 1), room))
        return [plan, *(each for each in kept if each.saved_layers)]

    def _most_residuals(self, plan: Plan, room: int | None = None) -> Plan:
        """As many layers with residuals as fit in `room` bytes (None: as a loop has, `_room_for_residuals`)."""

        def need(saved: int) -> int:
            return self.estimate(replace(plan, saved_layers=saved)).total

        there = self._room_for_residuals(plan) if room is None else room
        saved = bisect_right(range(len(self.layers) + 1), there, key=need) - 1
        return replace(plan, saved_layers=max(0, saved))

    def splits(self, output: str) -> bool:
        """Whether the planner may split a batch into micro-batches. It may not if the loss is not a sum over tokens: the loss
        would change, and that is the user's choice (`micro_batch_size`)."""
        whole = not self.captured.has_loss_denominator or self.captured.is_averaged
        return not self.captured.across_rows and not (output == "loss" and whole)

    def _sizes(self, batch: int, length: int) -> list[int]:
        if not self.splits(self.output):
            return [batch]
        largest = max(1, min(batch, FULL_TOKENS // length))
        sizes = [largest]
        while sizes[-1] > 1:
            sizes.append(sizes[-1] // 2)
        return sizes

    @staticmethod
    def _chunks(length: int) -> list[int]:
        """Powers of two below a sequence's length, the largest that is worth it first."""
        return [size for size in (1 << n for n in range(30, 0, -1)) if LEAST_CHUNK <= size <= FULL_TOKENS and size < length]

    @staticmethod
    def _intervals(depth: int) -> list[int]:
        intervals = [1]
        while intervals[-1] * 2 <= max(1, int(depth ** 0.5) + 1):
            intervals.append(intervals[-1] * 2)
        return intervals

    def resident(self) -> tuple[str, ...]:
        named = self.config.resident
        chosen = set(self.tiling.layouts if named == "all" else named) | set(self.resident_state())
        return tuple(tile for tile in self.tiling.layouts if tile in chosen)

    def resident_state(self) -> tuple[str, ...]:
        """By name where the user has named them."""
        named = self.config.resident_state
        if named is None:
            return self.stateful or ()
        return tuple(tile for tile in self._trained() if named == "all" or tile in named)

    def _visiting(self, update: str) -> tuple[str, ...]:
        return named_visits(self.config, self._trained(), self.resident_state(), update)
