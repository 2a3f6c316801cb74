"""Predicts the speed of a plan: by its simulated program, and by a cheap lower bound."""
from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megacompile.frontend.capture import CapturedModel
from megacompile.ir.placement import Updated
from megacompile.ir.plan import Plan
from megacompile.ir.program import Lane, Program, argument, model_program, op_of
from megacompile.passes import PIPELINE
from megacompile.passes.pipeline import Pass, run_pass
from megacompile.planning.memory import planned_calls
from megacompile.predict.durations import Durations
from megacompile.predict.hardware import Hardware
from megacompile.predict.simulate import StepTimes, Timeline, step_of
from megacompile.system.progress import at
from megacompile.weights.tiling import Tiling

#: Plans are chosen with this share of the rate of the host's AdamW, and of the link's rate if tiles visit the device. These
#: rates are the least certain, since everything on the host shares its memory. So a plan that lower rates would hurt must gain
#: more.
CAUTION = 0.95
#: `CAUTION` for steps with rows of uneven length: a step with few tokens hides less of the host's updates than the one that a
#: plan is made for.
UNEVEN_CAUTION = 0.75
#: If at least this share of a step waits for the host's updates, and the disk of these, another order of updates is tried.
HELD_UP = 0.01
_UPDATING = (Lane.CPU, Lane.DISK_READ, Lane.DISK_WRITE)
_ON_HOST = (Updated.ON_HOST, Updated.FROM_HOST_SUMS, Updated.FROM_DISK)


def simulator_of(captured: CapturedModel, tiling: Tiling, hardware: Hardware | None, fused: bool,
                 passes: Sequence[Pass] = PIPELINE) -> StepSimulator | None:
    """A simulator of steps on `hardware`; None if the machine's rates are unknown."""
    if hardware is None:
        return None
    caution = UNEVEN_CAUTION if captured.key.packed else CAUTION
    return StepSimulator(Durations(captured, tiling.layouts, hardware, fused), tiling, passes, caution)


@dataclass
class StepSimulator:
    """Simulates steps of one model on one machine.

    `caution`: the share of the host's rates with which plans are chosen. State: the results of simulations so far, by plan and
    whether a step is one program (`known`, and `cautious` ones), and the program that was made last."""

    durations: Durations
    tiling: Tiling
    passes: Sequence[Pass] = PIPELINE
    caution: float = CAUTION
    known: dict[tuple[Plan, bool], StepTimes] = field(default_factory=dict)
    cautious: dict[tuple[Plan, bool], float] = field(default_factory=dict)
    _latest: tuple[tuple[Plan, bool], Program] | None = None

    def with_caution(self, caution: float) -> StepSimulator:
        """This simulator, or one with another share of the host's rates."""
        return self if caution == self.caution else replace(self, caution=caution, cautious={})

    def times(self, plan: Plan, whole_step: bool) -> StepTimes:
        """The times of a training step under a plan."""
        key = plan, whole_step
        return self.known[key] if key in self.known else self.timeline(plan, whole_step)

    def timeline(self, plan: Plan, whole_step: bool) -> Timeline:
        """Some simulated training steps under a plan. Each call simulates again, since a timeline is too large to keep."""
        found = self.durations.simulate(self.program(plan, whole_step), plan)
        self.known[plan, whole_step] = found.without_items()
        return found

    def cautious_s(self, plan: Plan, whole_step: bool) -> float:
        """Seconds of a step on a host whose AdamW has only the share `caution` of its rate."""
        key = plan, whole_step
        if key not in self.cautious:
            hardware = self.durations.hardware
            link = {way: self.caution * rate for way, rate in hardware.link.items()} if (
                plan.visiting_state or plan.held_state) else hardware.link
            at(f"simulation {len(self.cautious) + 1}")
            slower = replace(self.durations, hardware=replace(hardware, adam=self.caution * hardware.adam, link=link))
            self.cautious[key] = slower.simulate(self.program(plan, whole_step), plan).step_s
        return self.cautious[key]

    def orders(self, plan: Plan, whole_step: bool, may_defer: bool) -> list[Plan]:
        """The plan, and one with another order of updates, if that may be faster. On arrival: lowest tiles first. At the end of
        a step: moments after all weights, if the host's updates delay the next forward."""
        if plan.update == "arrival":
            return list(dict.fromkeys((plan, self.lowest_first(plan, whole_step))))
        if not may_defer or plan.deferred_moments:
            return [plan]
        times = self.times(plan, whole_step)
        held_up = sum(times.critical_s[lane] for lane in _UPDATING) > HELD_UP * times.step_s
        return [plan, replace(plan, deferred_moments=True)] if held_up else [plan]

    def lowest_first(self, plan: Plan, whole_step: bool) -> Plan:
        """The plan with updates on arrival in another order: among the tiles that have arrived, the one that the next forward
        needs first comes first. The same plan if updates keep up with arrivals."""
        section = "train_step" if whole_step else "backward"
        items = [item for item in self.timeline(plan, whole_step).items if item.section == section]
        last = [item for item in items if item.step == items[-1].step]
        arrives = {argument(i.node, "tile"): i.end_s for i in last if op_of(i.node).name in ("offload", "add_to_sum")}
        updates = (i for i in last if op_of(i.node).name in ("update", "update_from_sum"))
        update_s = {argument(i.node, "tile"): i.end_s - i.start_s for i in updates}
        coming = sorted(update_s, key=arrives.__getitem__)
        order: list[str] = []
        now = 0.0
        waiting: list[str] = []  # they have arrived
        while coming or waiting:
            while coming and (not waiting or arrives[coming[0]] <= now) and self._has_slab(coming[0], waiting, plan):
                now = max(now, arrives[coming[0]])
                waiting.append(coming.pop(0))
            tile = min(waiting, key=list(self.tiling.layouts).index)
            waiting.remove(tile)
            order.append(tile)
            now += update_s[tile]
        return plan if order == sorted(order, key=arrives.__getitem__) else replace(plan, update_order=tuple(order))

    def _has_slab(self, tile: str, waiting: Sequence[str], plan: Plan) -> bool:
        """True if the gradients of a tile may arrive in a slab although those of others wait in theirs. Tiles that take turns
        in slabs are those of the boundary, or those of one size class of the layers."""
        alike = next((group for group in self._taking_turns if tile in group), frozenset({tile}))
        held = [each for each in alike.intersection(waiting)
                if plan.placement(each).updated is not Updated.FROM_HOST_SUMS]  # a sum has memory of its own
        return len(held) < (1 if tile in self.tiling.boundary() else plan.gradient_slabs)

    @functools.cached_property
    def _taking_turns(self) -> list[frozenset[str]]:
        tiling = self.tiling
        return [frozenset(tiling.boundary()), *(frozenset(x.name for x in layers) for layers in tiling.size_classes())]

    def program(self, plan: Plan, whole_step: bool) -> Program:
        """The sections of a training step, made as by `compile_program` but not verified. The chosen plan's program is verified
        when it is compiled."""
        if self._latest is None or self._latest[0] != (plan, whole_step):
            self._latest = (plan, whole_step), self._made(plan, whole_step)
        return self._latest[1]

    def _made(self, plan: Plan, whole_step: bool) -> Program:
        captured = self.durations.captured
        of_loss = plan.output == "loss"
        program = model_program(planned_calls(captured, self.tiling, plan), self.tiling.tiles(), plan.batch, of_loss,
                                whole_step, differentiable=not of_loss)
        for each in self.passes:
            program = run_pass(each, program.evolve(sections={key: program.section(key) for key in step_of(program)}), plan)
        return program

    def at_least(self, plan: Plan, may_defer: bool) -> float:
        """A lower bound in seconds for `cautious_s` of a plan and of its `orders`: the time of its templates. Where the host
        updates at the end of a step, also for each call the time of the updates of its weights and of all weights before it,
        and then of the templates from this call on."""
        forwards, total = self._templates(plan)
        if plan.update != "step":
            return total
        rates = self.durations.hardware
        faster = rates.adam_parts["weights"]  # than a whole update, on most hosts
        share = self.caution * (faster if plan.deferred_moments else max(1.0, faster) if may_defer else 1.0)
        tiles = {tile: layout for tile, layout in self.tiling.layouts.items()
                 if layout.trainable and plan.placement(tile).updated in _ON_HOST}
        found, updated, before = total, 0.0, 0.0
        for call, forward in forwards.items():
            updated += sum(self.durations.update_s(tiles.pop(tile)) / share / plan.spread for tile in self.tiling.tiles_of[call]
                           if tile in tiles)
            found = max(found, updated + total - before)
            before += forward
        return found

    def compute_s(self, plan: Plan) -> float:
        """Seconds of only the templates of a step."""
        return self._templates(plan)[1]

    def _templates(self, plan: Plan) -> tuple[dict[str, float], float]:
        """(seconds of the forward of each call in the first wave, seconds of all templates of a step)."""
        captured = self.durations.captured
        calls = captured.calls_for(plan.output)
        layers = [call.name for call in self.tiling.differentiated(captured.calls)]
        runs: dict[str, tuple[str, ...]] = {call.name: ("forward",) for call in calls}  # a call without a backward
        if any(self.tiling.layouts[tile].trainable for tile in self.tiling.tiles_of[calls[0].name]):
            runs[calls[0].name] = ("forward", "recompute_backward")
        runs |= dict.fromkeys(layers, ("forward_saving", "backward"))
        runs |= dict.fromkeys(plan.recomputed(layers), ("forward", "forward_saving", "backward"))
        runs |= {block[-1]: ("forward", "recompute_backward") for block in plan.blocks(layers)}
        runs[calls[-1].name] = ("loss",) if plan.output == "loss" else ("outputs", "recompute_backward")
        forwards, total = {call.name: 0.0 for call in calls}, 0.0
        for mb, size in enumerate(plan.sizes):
            for call in calls:
                seconds = [sum(self.durations.seconds(call.template, variant, *size, plan.token_chunk, plan.residuals))
                           for variant in runs[call.name]]
                total += sum(seconds)
                forwards[call.name] += seconds[0] if plan.wave_of(mb) == 0 else 0.0
        return forwards, total
