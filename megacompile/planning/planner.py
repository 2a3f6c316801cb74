"""Chooses a plan for a batch: the fastest in simulation of those that fit, or the preferred one if rates are unknown.

A plan has the largest micro-batch and the smallest checkpoint interval that fit the device. The remaining memory goes to waves,
to layers that keep residuals (all, or only attention's results) and to tiles that are updated on the device."""
from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Self

from megacompile.errors import InsufficientMemoryError, NoFittingPlanError
from megacompile.ir.options import rows
from megacompile.ir.placement import Updated
from megacompile.ir.plan import FULL_TOKENS, MORE_TOKENS, Plan
from megacompile.ir.program import Lane
from megacompile.planning import plan_cache
from megacompile.planning.plan_cache import free_memory, question
from megacompile.planning.search_space import SearchSpace
from megacompile.planning.step_time import StepSimulator
from megacompile.sizes import format_bytes

# -------------------- Remedies for a refusal: which batches and options would fit where no plan does
#: The shortest sequences that a remedy names.
LEAST_LENGTH = 16


def explained(space: SearchSpace, batch: int, length: int, training: bool, refusal: NoFittingPlanError,
              update: str = "step") -> NoFittingPlanError:
    """For a training step that does not fit the device: the refusal with the batches and options that would fit. Other refusals
    are returned unchanged."""
    if not training or refusal.need <= space.device_bytes:
        return refusal
    more = f"a larger device_memory ({format_bytes(refusal.need)} for this smallest plan)"
    batches, options = _batches(space, batch, length, update), _options(space, batch, length, update)
    if batches:
        remedy = f"use fewer or shorter sequences ({' or '.join(batches)} would fit), or {more}"
    else:
        remedy = f"use {more}, or a smaller model; no shorter sequence and no smaller batch fits"
    return NoFittingPlanError(refusal.cause, "\nor ".join([remedy, *options]) + space.averaging(), refusal.need)


def _batches(space: SearchSpace, batch: int, length: int, update: str) -> list[str]:
    """The largest batch of this length that fits, and the longest sequences with which this batch fits."""
    found = []
    fewer = bisect_left(range(1, batch), True, key=lambda count: not space.holds(count, length, update))
    if fewer:
        found.append(f"{fewer} x {length}")
    shorter = (length >> halvings for halvings in range(1, length.bit_length()))
    fitting = next((each for each in shorter if each >= LEAST_LENGTH and space.holds(batch, each, update)), None)
    if fitting is not None:
        found.append(f"{batch} x {fitting}")
    return found


def _options(space: SearchSpace, batch: int, length: int, update: str) -> list[str]:
    """The given options without which this batch would fit."""
    defaults = {name: default for name, default, row in rows() if row.hinders}
    given = {name: value for name, default in defaults.items() if (value := getattr(space.config, name)) != default}

    def hinders(name: str) -> bool:
        other: dict[str, Any] = {name: defaults[name]}
        return replace(space, config=replace(space.config, **other)).holds(batch, length, update)

    return [f"leave out {name}={value!r}" for name, value in given.items() if hinders(name)]


#: A plan replaces one that computes less if it is faster by this factor, since simulations are not exact.
WORTH = 1.003
#: A later plan must be faster by this factor than one that updates the earlier plans' tiles on the device. Otherwise a batch
#: of another size would move their state to the host, and all later steps would be planned again, with fewer tiles there.
WORTH_MOVING = 1.1
#: A plan that holds tiles must be faster by this factor than one that holds none. In float8, where that one had fewer waves, a
#: predicted gain of 1.8% was a measured loss of 0.3%.
WORTH_HOLDING = 1.02
#: Seconds of a step that issuing the copies and the update of a tile takes in Python, beside other lanes. Measured on a slow
#: processor with 30 layers of 576 channels: 2 ms.
ISSUING_S = 0.5e-3
#: Numbers of slabs for gradients to try, for updates on arrival.
_SLABS = (2, 3, 4, 6, 8, 10)
#: Numbers of slabs to try for moments on disk.
_STATE_SLABS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Choice:
    """A plan, and what it fixes for later plans.

    `stateful`: later plans update these tiles on the device, or fewer (`SearchSpace.stateful`). `answers`: how many plans of
    training steps were "searched", and how many were "kept" on disk."""

    plan: Plan
    stateful: tuple[str, ...] | None = None
    answers: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Planner(SearchSpace):
    """Chooses plans. `choose` is a function of these fields and its arguments. `cached`: plans are read from and written to the
    plan cache."""

    cached: bool = False

    def after(self, choice: Choice) -> Self:
        """The planner for the plans after this choice."""
        return replace(self, stateful=choice.stateful)

    def choose(self, batch: int, length: int, training: bool = True, update: str = "step",
               whole_step: bool = False, output: str = "loss") -> Choice:
        """The fastest plan that fits, for a loop or for a whole step as one program, with updates at "step" or on "arrival".

        Later plans update on the device the same tiles as the first training step. They update fewer if they must, or if that
        is much faster (`WORTH_MOVING`).

        Raises as `plan`."""
        if output != self.output:
            return replace(self, output=output).choose(batch, length, training, update, whole_step, output)
        asked = question(self, batch, length, update, whole_step) if self.cached and training else None
        kept = plan_cache.find(asked, free_memory(self)) if asked is not None else None
        if kept is not None and self._accepts(kept, batch, length, update):
            return Choice(kept, kept.resident_state, Counter(kept=1))
        found = self._search(batch, length, training, update, whole_step)
        if asked is not None:
            plan_cache.keep(asked, free_memory(self), found)
        fixes = training or self.stateful is not None
        return Choice(found, found.resident_state if fixes else None, Counter(searched=int(training)))

    def _accepts(self, kept: Plan, batch: int, length: int, update: str) -> bool:
        """True if a plan from the disk belongs to this step and fits."""
        asked = batch, length, update, self.output
        named = {*kept.placements, *kept.update_order}
        return (asked == (kept.batch, kept.length, kept.update, kept.output) and named <= self.tiling.layouts.keys()
                and self.fits(kept))

    def _search(self, batch: int, length: int, training: bool, update: str, whole_step: bool) -> Plan:
        """The fastest plan with as many slots as fit. Raises as `plan`; the error says what would fit."""
        refusals: list[NoFittingPlanError] = []
        for planner in self.with_fewer_slots():
            try:
                return planner._chosen(batch, length, training, update, whole_step)
            except NoFittingPlanError as error:
                refusals.append(error)
        raise explained(self, batch, length, training, min(refusals, key=lambda error: error.need), update)

    def _chosen(self, batch: int, length: int, training: bool, update: str, whole_step: bool) -> Plan:
        counts = self._state_counts(training)
        if self.simulator is None or not training or not self.keep_residuals:
            for count in counts:  # the first that fits
                try:
                    planner = self.with_state(count)
                    return (planner.plan_step(batch, length, update) if whole_step
                            else planner.plan(batch, length, training, update))
                except InsufficientMemoryError:
                    if count == counts[-1]:
                        raise
        assert self.simulator is not None, "every number of tiles was tried, and none was accepted or refused"
        return self._fastest(batch, length, update, whole_step, counts, self.simulator)

    def _fastest(self, batch: int, length: int, update: str, whole_step: bool, counts: Sequence[int],
                 simulator: StepSimulator) -> Plan:
        """The fastest plan in simulation, on a host that is slower than its rates (`StepSimulator.caution`). Simulates plans in
        the order of their lower bounds, until no other can be faster than the best. Among plans of nearly the same speed,
        chooses the one that computes least. A plan that moves state from the device must be much faster."""
        found = self._with_each_state(batch, length, update, whole_step, counts)
        states = (state for layout in self.tiling.layouts.values() for state in layout.state_layout.states)
        may_defer = self.config.deferred_moments is None and all(state.separable for state in states)
        orders: dict[Plan, list[Plan]] = {}
        fastest = float("inf")
        for bound, plan in sorted(((simulator.at_least(plan, may_defer), plan) for plan in found), key=lambda pair: pair[0]):
            if bound * WORTH >= fastest:
                break
            orders[plan] = simulator.orders(plan, whole_step, may_defer)
            fastest = min(fastest, *(self._compared_s(variant, whole_step, simulator) for variant in orders[plan]))
        tried = sorted((plan for plan in found if plan in orders), key=simulator.compute_s)
        best, *others = (variant for plan in tried for variant in orders[plan])
        for variant in others:
            if self._compared_s(variant, whole_step, simulator) * WORTH < self._compared_s(best, whole_step, simulator):
                best = variant
        best = self._all_there(best, found, whole_step, simulator)
        best = fastest_device_updates(self._with_each_count_held(best), simulator, whole_step)
        best = self._with_state_slabs(fewest_slabs(best, simulator, whole_step), simulator, whole_step)
        return fastest_device_updates(self._with_device_updates(best), simulator, whole_step)

    def _all_there(self, best: Plan, found: Iterable[Plan], whole_step: bool, simulator: StepSimulator) -> Plan:
        """The plan in `found` that computes as the best does and updates all tiles on the device, if the device also holds the
        results of all layers, and the step is as fast; else the best. Simulations do not know that issuing an op takes longer
        than the op in a small model."""
        if best.saved_layers < len(self.layers) or set(self.in_memory()) != set(self.tiling.layouts):
            return best
        there = (plan for plan in found if set(plan.resident_state) == set(self.in_memory()) and _work(plan) == _work(best))
        elsewhere = len(self.tiling.layouts) - len(best.resident_state)
        limit = self._compared_s(best, whole_step, simulator) + ISSUING_S * elsewhere
        return next((plan for plan in there if self._compared_s(plan, whole_step, simulator) <= limit), best)

    def _with_each_count_held(self, plan: Plan) -> list[Plan]:
        """A plan with held tiles, with none, the first one, the first two, ... of those that may be held, as far as they fit.
        Only the plan if it holds none, or those that the user has named."""
        if not plan.held_state or self.config.held_state is not None:
            return [plan]
        tiles = self.may_be_held(plan)
        plans = (plan.placed(Updated.HELD, tiles[:count]) for count in range(len(tiles) + 1))
        return list(itertools.takewhile(self.fits_device, plans))

    def _compared_s(self, plan: Plan, whole_step: bool, simulator: StepSimulator) -> float:
        """The seconds used to compare a plan with others. A plan that moves state from the device, or holds tiles, counts as
        slower than its step."""
        moves = self.stateful is not None and plan.resident_state != self.stateful
        return simulator.cautious_s(plan, whole_step) * (WORTH_MOVING if moves else WORTH_HOLDING if plan.held_state else 1)

    def _with_state_slabs(self, plan: Plan, simulator: StepSimulator, whole_step: bool) -> Plan:
        """The plan with the fewest slabs for moments on disk that do not slow the step. Tiles are read ahead into these
        slabs."""
        if not plan.disk_state or self.config.state_slabs is not None:
            return plan
        plans = [each for each in (replace(plan, state_slabs=count) for count in _STATE_SLABS) if self.fits_host(each)]
        fastest = min((simulator.cautious_s(each, whole_step) for each in plans), default=0.0)
        return next((each for each in plans if simulator.cautious_s(each, whole_step) <= WORTH * fastest), plan)

    def _with_device_updates(self, plan: Plan) -> list[Plan]:
        """The plan, and variants of it in which the first one, the first two, ... of the host-updated tiles visit the device.
        Checkpoints are in host memory if the device cannot hold them beside a visiting tile. Only the plan if no variant
        fits."""
        if (self.config.visiting_state is not None or self.pinned_bytes is not None  # visiting state takes pinned memory
                or plan.update != "step" or plan.visiting_state):
            return [plan]  # with whole matrices, as many tiles as possible stay there, and all others visit
        tiles = [tile for tile in self.trained() if plan.placement(tile).updated is Updated.ON_HOST]
        # The device memory that visiting takes does not depend on the number of tiles.
        visited = self.fewest_on_the_host(plan.placed(Updated.VISITING, tiles[:1]))
        if not self.fits(visited):
            return [plan]
        return [plan, *(visited.placed(Updated.VISITING, tiles[:count]) for count in range(1, len(tiles) + 1))]

    def _with_each_state(self, batch: int, length: int, update: str, whole_step: bool, counts: Sequence[int]) -> list[Plan]:
        """The plans that fit, for each number in `counts` of tiles that the device updates, and for a model in float8 or with
        experts also with larger micro-batches. Raises `InsufficientMemoryError` if none fits."""
        found: dict[Plan, None] = {}
        refusal: InsufficientMemoryError | None = None
        gains = self.config.recipe is not None or self.captured.has_experts
        larger = gains and self.config.micro_batch_size is None and batch * length > FULL_TOKENS
        for count, full_tokens in itertools.product(counts, (FULL_TOKENS, MORE_TOKENS) if larger else (FULL_TOKENS,)):
            try:
                planner = replace(self.with_state(count), full_tokens=full_tokens)
                plans = (planner.step_plans(batch, length, update) if whole_step
                         else planner.residuals_either_way(planner.plan(batch, length, update=update)))
            except InsufficientMemoryError as error:
                refusal = error if count == min(counts) else refusal  # the fewest tiles need the least memory
                continue
            found |= dict.fromkeys(plan for plan in plans if self.fits(plan))
        if refusal is not None and not found:
            raise refusal
        return [*found, *(self._with_held_state(found) if whole_step else ())]

    def _with_held_state(self, found: Iterable[Plan]) -> Iterator[Plan]:
        """Variants of plans with several waves in which the device holds tiles for their update, from the first that the host
        updates on: about as many as the link brings there while it copies no other weights, and fewer. Within one wave they
        would take the memory that its forward needs. Of plans that differ in the number of tiles that stay on the device alone,
        only the one that keeps the most beside the most residuals, and the one that keeps more."""
        if self.simulator is None or self.config.held_state is not None or self.pinned_bytes is not None:
            return  # the state of held tiles is pinned
        groups = defaultdict[Any, list[Plan]](list)
        for plan in found:
            groups[plan.micro_batches, plan.waves, plan.residuals, bool(plan.host_sums)].append(plan)
        for (_, waves, _, summed), plans in groups.items():
            if waves == 1 or summed:
                continue
            kept = len(min(plans, key=self._by_compute).resident_state)
            for plan in sorted((p for p in plans if len(p.resident_state) >= kept), key=lambda p: len(p.resident_state))[:2]:
                tiles, specs = self.may_be_held(plan), self.tiling.tiles()
                idle_s = self.simulator.compute_s(plan) / waves * len(plan.resident) / len(self.tiling.layouts)
                sizes = accumulate(specs[tile].state_bytes for tile in tiles)
                most = sum(size <= idle_s * self.simulator.durations.hardware.link["h2d"] for size in sizes)
                # They need some memory of their own: that of a tile that stays.
                bases = plan, plan.placed(Updated.ON_DEVICE, plan.resident_state[:-1])
                for count in (most, 3 * most // 4):
                    variants = (base.placed(Updated.HELD, self.may_be_held(base)[:count]) for base in bases)
                    yield from [each for each in variants if each.held_state and self.fits_device(each)][:1]

    def _by_compute(self, plan: Plan) -> tuple[float, int]:
        assert self.simulator is not None
        return self.simulator.compute_s(plan), -len(plan.resident_state)

    def _state_counts(self, training: bool) -> list[int]:
        """The numbers of tiles that the device may update, in order of preference."""
        if self.config.resident_state is not None:
            return [0]  # the user has named them
        if self.stateful is not None:
            return list(range(len(self.stateful), -1, -1))
        if not training or not self.keep_residuals or self.simulator is None:
            return [0]
        trained = len(self.in_memory())
        return sorted({0, 1, trained, *range(2, trained, max(1, trained // 12))})


def _work(plan: Plan) -> tuple[Any, ...]:
    """What a plan computes, wherever tiles are."""
    return plan.micro_batches, plan.checkpoint_interval, plan.saved_layers, plan.residuals, plan.waves, plan.token_chunk


def fewest_slabs(plan: Plan, simulator: StepSimulator, whole_step: bool) -> Plan:
    """The plan with the fewest slabs for gradients that do not slow a step with updates on arrival, since gradients that wait
    for their update take host memory. A plan with updates at the end of a step is returned unchanged."""
    if plan.update != "arrival":
        return plan
    limit = WORTH * simulator.cautious_s(plan, whole_step)
    variants: dict[int, Plan] = {}

    def keeps_up(count: int) -> bool:
        fewer = replace(plan, gradient_slabs=count, update_order=())
        orders = simulator.orders(fewer, whole_step, False)
        variants[count] = min(orders, key=lambda each: simulator.cautious_s(each, whole_step))
        return simulator.cautious_s(variants[count], whole_step) <= limit

    counts = [count for count in _SLABS if count < plan.gradient_slabs]
    found = bisect_left(counts, True, key=keeps_up)  # a step with more slabs takes no longer
    return variants[counts[found]] if found < len(counts) else plan


def fastest_device_updates(plans: Sequence[Plan], simulator: StepSimulator, whole_step: bool) -> Plan:
    """The fastest of `plans`, each of which lets one more tile visit, or be held, than the plan before it. The first plan, if
    no other is faster by a factor of `WORTH`, or if the host's updates delay its step by less than that.

    The host's updates are bound by its memory bandwidth, which copies use too. A visit moves about as many bytes as an update
    on the host. So visits gain most if the link is idle, and nothing if the host keeps up. All visits come before the next
    forward's weights, which are copied in the same lane. Too many held tiles delay the update, since the link cannot bring
    their state in time. Only a simulation can tell how many are best."""
    if len(plans) == 1:
        return plans[0]
    times = simulator.times(plans[0], whole_step)
    if times.critical_s[Lane.CPU] * WORTH <= (WORTH - 1) * times.step_s:
        return plans[0]

    def seconds(count: int) -> float:
        return simulator.cautious_s(plans[count], whole_step)

    # Seconds fall up to the best count and rise after it.
    best = bisect_left(range(len(plans) - 1), True, key=lambda count: seconds(count + 1) >= seconds(count))
    return plans[best] if seconds(best) * WORTH < seconds(0) else plans[0]
