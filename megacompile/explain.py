"""Candidate plans side by side: what each would take and how fast it would be, predicted before anything runs."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from megacompile.plan import Plan
from megacompile.planner import Planner
from megacompile.program import Lane, place_kind, places
from megacompile.simulate import Timeline, step_of
from megacompile.sizes import format_bytes

#: Of each checkpoint interval: so many sizes of micro-batches that fit. Smaller ones are only slower.
SIZES_EACH = 2
#: Kinds of slots that are host memory.
_SLABS = ("S", "D", "H")


@dataclass(frozen=True)
class Candidate:
    """A plan, its needs in bytes, and how its program would run; `timeline` is None where it does not fit."""

    plan: Plan
    device_bytes: int
    host_bytes: int
    timeline: Timeline | None


def candidates(planner: Planner, batch: int, length: int, update: str | None = None) -> list[Candidate]:
    """The plans that the planner considers for a training step (as one program, with an `update`), those that fit
    simulated, in its order of preference."""
    plans = _worth_a_look(planner.considered(batch, length, update), planner)
    return [_candidate(planner, plan, update is not None) for plan in plans]


def _worth_a_look(plans: Iterable[Plan], planner: Planner) -> Iterator[Plan]:
    sizes: dict[tuple[int, int], set[int]] = {}
    for plan in plans:
        seen = sizes.setdefault((plan.checkpoint_interval, plan.waves), set())
        if plan.micro_batches[0] in seen or len(seen) < SIZES_EACH:
            yield plan
            if planner.fits(plan):
                seen.add(plan.micro_batches[0])


def _candidate(planner: Planner, plan: Plan, whole_step: bool) -> Candidate:
    needed, host_bytes = planner.estimate(plan, plan.length).total + planner.margin_bytes, planner.tiling.host_bytes()
    if not planner.fits(plan):
        return Candidate(plan, needed, host_bytes, None)
    assert planner.pace is not None, "nothing is known of the machine"
    slabs = 0
    if not plan.locked or plan.host_checkpoints:
        program = planner.pace.program(plan, whole_step)
        used = places(program.section(section) for section in step_of(program))
        slabs = sum(slot.bytes for name, slot in program.slots.items() if name in used and place_kind(name) in _SLABS)
    return Candidate(plan, needed, host_bytes + slabs, planner.pace.timeline(plan, whole_step))


def _alike(plan: Plan, other: Plan) -> bool:
    return (plan.batch, plan.length, plan.update) == (other.batch, other.length, other.update)


def explain(planner: Planner, chosen: Plan, whole_step: bool = False) -> str:
    """Text: the chosen plan's lanes, then a row for each candidate, the chosen one marked. TFLOPS are 6 x parameters x
    tokens / step; "critical" is the part of a step that each lane holds up."""
    assert planner.pace is not None, "nothing is known of the machine"
    found = candidates(planner, chosen.batch, chosen.length, chosen.update if whole_step else None)
    tried = [plan for plan, whole in planner.pace.timelines if whole == whole_step and _alike(plan, chosen)]
    listed = {c.plan for c in found}
    found += [_candidate(planner, plan, whole_step) for plan in dict.fromkeys([chosen, *tried]) if plan not in listed]
    found.sort(key=lambda c: c.timeline.step_s if c.timeline is not None else float("inf"))
    parameters = sum(layout.parameters for layout in planner.tiling.layouts.values())
    operations = 6 * parameters * chosen.batch * chosen.length
    own = next(c.timeline for c in found if c.plan == chosen)
    hardware = planner.pace.durations.hardware
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
                 plan.host_checkpoints, len(plan.resident_state),
                 f"{each.device_bytes / 2**30:.1f}", f"{each.host_bytes / 2**30:.1f}")
        if timeline is None:
            rows.append(("", *sizes, "does not fit", "", ""))
            continue
        critical = sorted(((seconds, lane) for lane, seconds in timeline.critical().items()), reverse=True)
        parts = ", ".join(f"{lane} {seconds / timeline.step_s:.0%}" for seconds, lane in critical
                          if seconds >= 0.01 * timeline.step_s)
        rows.append(("->" if plan == chosen else "", *sizes, f"{timeline.step_s:.3f}",
                     f"{operations / timeline.step_s / 1e12:.3g}", f"{timeline.occupancy(Lane.COMPUTE):.0%}", parts))
    header = ["", "K", "micro-batch", "waves", "saved layers", "host checkpoints", "updated there", "device GiB", "host GiB",
              "step s", "TFLOPS", "compute busy", "critical"]
    return str(tabulate(rows, header, tablefmt="simple", disable_numparse=True, colalign=(
        "left", *["right"] * 11, "left")))
