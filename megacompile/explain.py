"""Candidate plans side by side: what each would take and how fast it would be, predicted before anything runs."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from megacompile.config import format_bytes
from megacompile.durations import Durations
from megacompile.lowering import model_program
from megacompile.passes import PIPELINE
from megacompile.plan import Plan
from megacompile.planner import Planner
from megacompile.program import Lane, Program, place_kind, places
from megacompile.simulate import Timeline, simulate, step_of

#: Of each checkpoint interval: so many sizes of micro-batches that fit. Smaller ones are only slower.
SIZES_EACH = 2
#: Kinds of slots that are host memory.
_SLABS = ("staging", "slab")


@dataclass(frozen=True)
class Candidate:
    """A plan, its needs in bytes, and how its program would run; `timeline` is None where it does not fit."""

    plan: Plan
    device_bytes: int
    host_bytes: int
    timeline: Timeline | None


def candidates(planner: Planner, durations: Durations, batch: int, length: int,
               update: str | None = None) -> list[Candidate]:
    """The plans that the planner considers for a training step (as one program, with an `update`), those that fit
    simulated, in its order of preference."""
    plans = _worth_a_look(planner.considered(batch, length, update), planner)
    return [_candidate(planner, durations, plan, update is not None) for plan in plans]


def _worth_a_look(plans: Iterable[Plan], planner: Planner) -> Iterator[Plan]:
    sizes: dict[tuple[int, int], set[int]] = {}
    for plan in plans:
        seen = sizes.setdefault((plan.checkpoint_interval, plan.waves), set())
        if plan.micro_batches[0] in seen or len(seen) < SIZES_EACH:
            yield plan
            if planner.fits(plan):
                seen.add(plan.micro_batches[0])


def _candidate(planner: Planner, durations: Durations, plan: Plan, whole_step: bool) -> Candidate:
    needed, host_bytes = planner.estimate(plan, plan.length).total + planner.margin_bytes, planner.tiling.host_bytes()
    if not planner.fits(plan):
        return Candidate(plan, needed, host_bytes, None)
    program = program_of(planner, plan, whole_step)
    used = places(program.section(section) for section in step_of(program))
    slabs = sum(slot.bytes for name, slot in program.slots.items() if name in used and place_kind(name) in _SLABS)
    timeline = simulate(program, durations.of(program, plan.length, plan.token_chunk), durations.hardware.speeds)
    return Candidate(plan, needed, host_bytes + slabs, timeline)


def program_of(planner: Planner, plan: Plan, whole_step: bool) -> Program:
    """As `compile_program` makes it, unverified: what is chosen is verified when it is compiled."""
    captured, tiling = planner.captured, planner.tiling
    specs = tiling.call_specs(captured.calls, captured.templates)
    program = model_program(specs, tiling.tiles(), plan.batch, labels=True, whole_step=whole_step)
    program = program.evolve(sections={key: graph for key, graph in program.sections.items() if key != "evaluate"})
    for each in PIPELINE:
        program = each.run(program, plan)
    return program


def explain(planner: Planner, durations: Durations, chosen: Plan, whole_step: bool = False) -> str:
    """Text: the chosen plan's lanes, then a row for each candidate, the chosen one marked. TFLOPS are 6 x parameters x
    tokens / step; "critical" is the part of a step that each lane holds up."""
    found = candidates(planner, durations, chosen.batch, chosen.length, chosen.update if whole_step else None)
    if chosen not in [c.plan for c in found]:
        found.insert(0, _candidate(planner, durations, chosen, whole_step))
    parameters = sum(layout.parameters for layout in planner.tiling.layouts.values())
    operations = 6 * parameters * chosen.batch * chosen.length
    own = next(c.timeline for c in found if c.plan == chosen)
    hardware = durations.hardware
    lines = [f"{chosen.batch} x {chosen.length} tokens a step, {parameters:,} parameters, within "
             f"{format_bytes(planner.device_bytes)} of device memory",
             f"rates of {hardware.name}: {hardware.source}", ""]
    if own is not None:
        lines += [own.table(), ""]
    return "\n".join([*lines, _table(found, chosen, operations)])


def _table(found: Sequence[Candidate], chosen: Plan, operations: int) -> str:
    rows: list[tuple[object, ...]] = []
    for each in found:
        plan, timeline = each.plan, each.timeline
        chunked = f" ({plan.token_chunk} tokens at a time)" if plan.token_chunk else ""
        sizes = (plan.checkpoint_interval, f"{plan.micro_batches[0]}{chunked}", plan.waves, plan.saved_layers,
                 f"{each.device_bytes / 2**30:.1f}", f"{each.host_bytes / 2**30:.1f}")
        if timeline is None:
            rows.append(("", *sizes, "does not fit", "", ""))
            continue
        critical = sorted(((seconds, lane) for lane, seconds in timeline.critical().items()), reverse=True)
        parts = ", ".join(f"{lane} {seconds / timeline.step_s:.0%}" for seconds, lane in critical
                          if seconds >= 0.01 * timeline.step_s)
        rows.append(("->" if plan == chosen else "", *sizes, f"{timeline.step_s:.3f}",
                     f"{operations / timeline.step_s / 1e12:.3g}", f"{timeline.occupancy(Lane.COMPUTE):.0%}", parts))
    header = ["", "K", "micro-batch", "waves", "saved layers", "device GiB", "host GiB", "step s", "TFLOPS",
              "compute busy", "critical"]
    return str(tabulate(rows, header, tablefmt="simple", disable_numparse=True, colalign=(
        "left", *["right"] * 9, "left")))
