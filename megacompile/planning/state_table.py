"""The ways to keep optimizer state side by side: bytes, whether the host holds them, and the predicted speed."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tabulate import tabulate

from megacompile.ir.placement import Updated
from megacompile.ir.plan import Plan
from megacompile.planning.planner import Planner
from megacompile.planning.state_choices import StateChoice, bytes_each, combinations, with_choice
from megacompile.weights.tiling import HOST_MARGIN_BYTES

#: Slabs that gradients pass through where they are not kept: enough that updates keep up with most backwards.
_SLABS_ON_ARRIVAL = 4


@dataclass(frozen=True)
class StateRow:
    """`bytes_each`: of host memory for each parameter of a tile that is trained. `host_bytes`: those of training, margins
    included. `step_s`: predicted seconds of a step with updates of this state."""

    choice: StateChoice
    bytes_each: float
    host_bytes: int
    step_s: float


def state_rows(planner: Planner, plan: Plan, whole_step: bool) -> list[StateRow]:
    """A row for each way to keep the state of the model's optimizer, with everything else as in `plan`, so that a plan of its
    own may be faster. Empty where nothing is trained."""
    trained = [layout for layout in planner.tiling.host.values() if layout.trainable]
    if not trained:
        return []
    return [_row(planner, plan, choice, whole_step)
            for choice in combinations({layout.dtype for layout in trained}, clipped=planner.tiling.has_matrices)]


def _row(planner: Planner, plan: Plan, choice: StateChoice, whole_step: bool) -> StateRow:
    assert planner.simulator is not None, "nothing is known of the machine"
    tiling = with_choice(planner.tiling, choice)
    with_state = replace(planner, tiling=tiling)
    plan = _fitting(_updating(plan, choice.on_arrival), with_state)
    durations = replace(planner.simulator.durations, layouts=tiling.layouts)
    program = planner.simulator.program(plan, whole_step).evolve(tiles=tiling.tiles())  # visits take as long as their bytes
    step_s = durations.simulate(program, plan).step_s
    beside = with_state.host_parts(plan)
    host_bytes = tiling.host_bytes(gradients=False) + sum(beside.values()) + plan.ranks * HOST_MARGIN_BYTES
    return StateRow(choice, bytes_each(tiling, choice.on_arrival), host_bytes, step_s)


def _updating(plan: Plan, on_arrival: bool) -> Plan:
    """The plan with updates on arrival, or at the end of the step."""
    if on_arrival == (plan.update == "arrival"):
        return plan
    if not on_arrival:
        return replace(plan, update="step", update_order=())
    return replace(plan.placed(Updated.VISITING, ()), update="arrival", deferred_moments=False,
                   gradient_slabs=_SLABS_ON_ARRIVAL)


def _fitting(plan: Plan, planner: Planner) -> Plan:
    """The plan with as many of its tiles updated on the device as fit there with their state."""
    if planner.tiling.has_matrices:
        return plan  # those that do not stay visit, and take memory too
    there = plan.resident_state
    for count in range(len(there), 0, -1):
        fewer = plan.placed(Updated.ON_DEVICE, there[:count])
        if planner.fits_device(fewer):
            return fewer
    return plan.placed(Updated.ON_DEVICE, ())


def state_table(rows: Sequence[StateRow], tokens: int, host_budget: int) -> str:
    """The rows as text. `tokens`: those of a step, on all ranks."""
    cells = [(row.choice.format.name, "float32" if row.choice.exact else "bfloat16",
              "on arrival" if row.choice.on_arrival else "clipped", f"{row.bytes_each:.3g}", f"{row.host_bytes / 2**30:.1f}",
              "fits" if row.host_bytes <= host_budget else "does not fit", f"{tokens / row.step_s:,.0f}") for row in rows]
    header = ["state_dtype", "master", "update", "bytes/parameter", "host GiB", "", "tokens/s"]
    return str(tabulate(cells, header, tablefmt="simple", disable_numparse=True,
                        colalign=("left", "left", "left", "right", "right", "left", "right")))
