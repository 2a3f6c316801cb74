"""Candidate plans side by side: predicted memory and time of each, before anything runs."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tabulate import tabulate

from megacompile.errors import listed
from megacompile.frontend.templates.template import BATCH, LENGTH
from megacompile.ir.ops import TEMPLATE_OPS
from megacompile.ir.placement import Updated
from megacompile.ir.places import OF_A_FORWARD, Family
from megacompile.ir.plan import Plan, kept_residuals
from megacompile.ir.program import Lane, Program, argument, find, place_kind, places
from megacompile.planning.host_needs import StateChoice, bytes_each, combinations, with_choice
from megacompile.planning.planner import Planner
from megacompile.planning.precision import described_products
from megacompile.planning.search_space import MOST_SEQUENCES
from megacompile.predict.simulate import StepTimes, step_of
from megacompile.sizes import format_bytes

# --------------------
# The ways to keep optimizer state side by side: bytes, whether the host holds them, and the predicted speed.
#: Slabs that gradients pass through where they are not kept: enough that updates keep up with most backwards.
_SLABS_ON_ARRIVAL = 4


@dataclass(frozen=True)
class StateRow:
    """`bytes_each`: host memory for each trained parameter. `host_bytes`: for training, margins included. `step_s`: predicted
    seconds of a step with updates of this state."""

    choice: StateChoice
    bytes_each: float
    host_bytes: int
    step_s: float


def state_rows(planner: Planner, plan: Plan, whole_step: bool) -> list[StateRow]:
    """A row for each way to store the state of the model's optimizer, with everything else as in `plan`. A plan made for the
    row's state may be faster. Empty if nothing is trained."""
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
    host_bytes = tiling.host_bytes(gradients=False) + sum(beside.values()) + tiling.margin_bytes
    return StateRow(choice, bytes_each(tiling, choice.on_arrival), host_bytes, step_s)


def _updating(plan: Plan, on_arrival: bool) -> Plan:
    """The plan with updates on arrival, or at the end of the step."""
    if on_arrival == (plan.update == "arrival"):
        return plan
    if not on_arrival:
        return replace(plan, update="step", update_order=())
    at_home = plan.placed(Updated.VISITING, ()).placed(Updated.HELD, ())
    return replace(at_home, update="arrival", deferred_moments=False,
                   gradient_slabs=_SLABS_ON_ARRIVAL)


def _fitting(plan: Plan, planner: Planner) -> Plan:
    """The plan with as many of its device-updated tiles as fit on the device with their state."""
    if planner.tiling.has_matrices:
        return plan  # those that do not stay visit, and take memory too
    there = plan.resident_state
    for count in range(len(there), 0, -1):
        fewer = plan.placed(Updated.ON_DEVICE, there[:count])
        if planner.fits_device(fewer):
            return fewer
    return plan.placed(Updated.ON_DEVICE, ())


def state_table(rows: Sequence[StateRow], tokens: int, host_budget: int) -> str:
    """The rows as text. `tokens`: of a step, on all ranks."""
    cells = [(row.choice.format.name, "float32" if row.choice.exact else "bfloat16",
              "on arrival" if row.choice.on_arrival else "clipped", f"{row.bytes_each:.3g}", f"{row.host_bytes / 2**30:.1f}",
              "fits" if row.host_bytes <= host_budget else "does not fit", f"{tokens / row.step_s:,.0f}") for row in rows]
    header = ["state_dtype", "master", "update", "bytes/parameter", "host GiB", "", "tokens/s"]
    return str(tabulate(cells, header, tablefmt="simple", disable_numparse=True,
                        colalign=("left", "left", "left", "right", "right", "left", "right")))


#: Number of listed micro-batch sizes that fit, for each checkpoint interval. Smaller ones are only slower.
SIZES_EACH = 2
#: Families of slots in host memory.
_SLABS = (Family.WEIGHT_SLABS, Family.GRADIENT_SLABS, Family.STATE_SLABS, *OF_A_FORWARD)


@dataclass(frozen=True)
class Candidate:
    """A plan, the bytes that it needs, and the times of its steps (None if it does not fit)."""

    plan: Plan
    device_bytes: int
    host_bytes: int
    times: StepTimes | None


def candidates(planner: Planner, batch: int, length: int, update: str = "step", whole_step: bool = False) -> list[Candidate]:
    """The plans that the planner considers for a training step, in its order of preference; those that fit are simulated."""
    plans = _worth_a_look(planner.considered(batch, length, update, whole_step), planner)
    return [candidate(planner, plan, whole_step) for plan in plans]


def _worth_a_look(plans: Iterable[Plan], planner: Planner) -> Iterator[Plan]:
    sizes: dict[tuple[int, int], set[int]] = {}
    for plan in plans:
        seen = sizes.setdefault((plan.checkpoint_interval, plan.waves), set())
        if plan.micro_batches[0] in seen or len(seen) < SIZES_EACH:
            yield plan
            if planner.fits(plan):
                seen.add(plan.micro_batches[0])


def candidate(planner: Planner, plan: Plan, whole_step: bool) -> Candidate:
    """The plan with its bytes of device and host memory, and simulated steps if it fits."""
    needed = planner.estimate(plan).total + planner.margin_bytes
    more = planner.host_parts(plan)
    host_bytes = planner.tiling.host_bytes(gradients=False) + more["gradients"] + more["sums"]
    if not planner.fits(plan):
        return Candidate(plan, needed, host_bytes, None)
    assert planner.simulator is not None, "nothing is known of the machine"
    slabs = 0
    if not plan.pinned or plan.host_checkpoints or plan.update == "arrival" or plan.disk_state:
        slabs = planner.tiling.ranks_here * host_slab_bytes(planner.simulator.program(plan, whole_step))
    return Candidate(plan, needed, host_bytes + slabs, planner.simulator.times(plan, whole_step))


def host_slab_bytes(program: Program) -> int:
    """Bytes of the slabs, checkpoints and residuals in host memory that a step of one rank uses."""
    used = places(program.section(section) for section in step_of(program))
    return sum(slot.bytes for name, slot in program.slots.items() if name in used and place_kind(name) in _SLABS)


def _alike(plan: Plan, other: Plan) -> bool:
    return (plan.batch, plan.length, plan.update) == (other.batch, other.length, other.update)


@dataclass(frozen=True)
class Outlook:
    """The prospects of training under a plan, before anything runs.

    Attributes:
        candidates: the plan and its alternatives, the fastest first, those that do not fit last.
        host_parts: bytes of host memory by part of the tiles, and "sums" of waves and "slabs" in addition.
        host_budget: bytes of host memory that may be used.
        largest_batch: the most sequences of this length whose step fits the device.
        states: the plan with each way to keep optimizer state.
        useful: the share of the plan's tokens that are not padding.
        whole_step: a step is one program.
    """

    planner: Planner
    plan: Plan
    candidates: tuple[Candidate, ...]
    host_parts: Mapping[str, int]
    host_budget: int
    largest_batch: int
    states: tuple[StateRow, ...] = ()
    useful: float = 1.0
    whole_step: bool = False

    @property
    def chosen(self) -> Candidate:
        return next(each for each in self.candidates if each.plan == self.plan)

    @property
    def fits(self) -> bool:
        return self.chosen.times is not None and self.host_needed <= self.host_budget

    @property
    def host_needed(self) -> int:
        """Bytes of host memory that training needs, the margin of each rank included."""
        return sum(self.host_parts.values()) + self.planner.tiling.margin_bytes

    def text(self, disk_rating: int | None = None) -> str:
        """The verdict, the host's memory, the ways to store optimizer state, the chosen plan's lanes, then a row for each
        candidate. An arrow marks the chosen one. `disk_rating`: bytes that the drives may write in their life.

        TFLOPS are 6 x parameters x tokens / step (4 for frozen parameters, 2 below the backward), those of one GPU. Only
        experts that a token is routed to count. "critical" is the share of a step that waits for each lane. The lane with the
        largest share is the bottleneck."""
        plan, chosen, planner = self.plan, self.chosen, self.planner
        assert planner.simulator is not None, "nothing is known of the machine"
        hardware = planner.simulator.durations.hardware
        parameters = sum(layout.parameters for layout in planner.tiling.layouts.values())
        each = planner.tiling.operations(_active_shares(planner))
        operations = each * plan.tokens
        trained = sum(layout.parameters for layout in planner.tiling.layouts.values() if layout.trainable)
        frozen = f", {trained:,} of them trained" if trained < parameters else ""
        update = ", updates on arrival of gradients" if plan.update == "arrival" else ""
        several = f" on each of {plan.gpus}" if plan.processes > 1 else ""
        if (together := planner.captured.key.sequence_ranks) > 1:
            several += f", {together} of which have {plan.length * together} tokens of each sequence together"
        lengths = f" (micro-batches of {_in_words(plan)})" if plan.lengths else ""
        lines = [f"{plan.batch} x {plan.length} tokens a step{lengths}{several}{update}, {parameters:,} parameters{frozen}",
                 f"rates of {hardware.name}: {hardware.source}", "",
                 _verdict("device", chosen.device_bytes, planner.device_bytes),
                 _verdict("host", self.host_needed, self.host_budget)]
        if self.plan.disk_state:
            lines += [self._disk(disk_rating)]
        if chosen.times is not None:
            step, rate = chosen.times, self.useful * plan.tokens / chosen.times.step_s
            whole = f" ({rate:,.0f} on each of {plan.gpus})" if plan.processes > 1 else ""
            tokens = "useful tokens" if self.useful < 1 else "tokens"
            lines += [f"speed: {step.step_s:.3f} s a step, {plan.processes * rate:,.0f} {tokens}/s{whole}, "
                      f"{operations / step.step_s / 1e12:.3g} TFLOPS{' each' if whole else ''}; {step.binds} binds "
                      f"({step.critical_s[step.binds] / step.step_s:.0%} of the step)"]
        slots = {"weights": plan.weight_slots, "gradients": plan.gradient_slots}
        if single := [name for name, count in slots.items() if count == 1]:
            lines += [f"slots: one of {' and one of '.join(single)}, for want of device memory: some copies wait for compute"]
        lines += described_products(planner.captured)
        lines += [f"largest batch: {self.largest_batch}{' or more' * (self.largest_batch == MOST_SEQUENCES)} sequences of "
                  f"{plan.length} tokens fit the device", self._parts(), "",
                  _host_table(self.host_parts, parameters), ""]
        if self.states:
            lines += [state_table(self.states, plan.ranks * plan.tokens, self.host_budget), ""]
        if chosen.times is not None:
            lines += [chosen.times.table(), ""]
        return "\n".join([*lines, _table(self.candidates, plan, each, planner.layers)])

    def _parts(self) -> str:
        """A line with the weights, and the time of compute in a step, of parts of the model."""
        planner, simulator = self.planner, self.planner.simulator
        assert simulator is not None, "nothing is known of the machine"
        held = _weights_of_parts(planner)
        spent = dict.fromkeys((*held, "attention"), 0.0)
        program = simulator.program(self.plan, self.whole_step)
        outside = {call.template for call in (planner.captured.calls[0], planner.captured.calls[-1])}
        for section in step_of(program):
            for node in find(program.section(section), *TEMPLATE_OPS):
                seconds = simulator.durations.of_template(program, node, self.plan)
                if argument(node, "template") in outside:
                    spent["vocabulary"] += sum(seconds)
                else:
                    for part, each in zip(("experts", "attention", "the rest"), seconds, strict=True):
                        spent[part] += each
        names = {"experts": "products of experts", "attention": "kernels of attention"}
        cells = {part: [format_bytes(held.get(part, 0))] * (part in held) + [f"{seconds:.3g} s"] * (seconds > 0)
                 for part, seconds in spent.items()}
        return "parts: " + "; ".join(f"{names.get(part, part)} {', '.join(each)}" for part, each in cells.items() if each)

    def _disk(self, rating: int | None) -> str:
        """A line about moments on disk."""
        tiles = self.planner.tiling.layouts
        written = self.planner.tiling.ranks_here * sum(tiles[tile].disk_bytes for tile in self.plan.disk_state)
        lasts = "" if not rating else f"; drives rated for {rating / 1e15:.3g} PB last {rating // written:,} steps"
        trained = sum(layout.trainable for layout in tiles.values())
        read = "read twice" if self.plan.deferred_moments else "read"
        return (f"disk: the moments of {len(self.plan.disk_state)} of {trained} tiles, {format_bytes(written)}, are {read} and "
                f"written in each step, through {self.plan.state_slabs} slabs for layers{lasts}")


def outlook(planner: Planner, chosen: Plan, host_budget: int, whole_step: bool = False, useful: float = 1.0) -> Outlook:
    """Simulates a plan and its alternatives. `host_budget`: bytes. `useful`: the share of tokens that are not padding."""
    assert planner.simulator is not None, "nothing is known of the machine"
    found = candidates(planner, chosen.batch, chosen.length, chosen.update, whole_step)
    tried = [plan for plan, whole in planner.simulator.cautious if whole == whole_step and _alike(plan, chosen)]
    listed = {c.plan for c in found}
    found += [candidate(planner, plan, whole_step) for plan in dict.fromkeys([chosen, *tried]) if plan not in listed]
    found.sort(key=lambda c: c.times.step_s if c.times is not None else float("inf"))
    sums = planner.host_parts(chosen)["sums"]
    parts = planner.tiling.host_parts(gradients=chosen.update == "step") | ({"sums": sums} if sums else {})
    slabs = next(c.host_bytes for c in found if c.plan == chosen) - sum(parts.values())
    return Outlook(planner, chosen, tuple(found), parts | ({"slabs": slabs} if slabs else {}), host_budget,
                   planner.largest_batch(chosen.length, chosen.update), tuple(state_rows(planner, chosen, whole_step)), useful,
                   whole_step)


def _in_words(plan: Plan) -> str:
    """The micro-batches of a plan whose lengths differ: "1 x 2048, 2 of 4 x 512"."""
    counts = Counter(plan.sizes)
    return listed([f"{f'{count} of ' if count > 1 else ''}{rows} x {length}" for (rows, length), count in counts.items()], 12)


def _verdict(memory: str, needed: int, there: int) -> str:
    """A line that says whether the plan fits this memory."""
    return f"{memory}: {'fits' if needed <= there else 'does not fit'}, {format_bytes(needed)} of {format_bytes(there)}"


def _host_table(parts: Mapping[str, int], parameters: int) -> str:
    rows = [(name, f"{count / 2**30:.1f}", f"{count / parameters:.2f}") for name, count in [*parts.items(), (
        "all", sum(parts.values()))]]
    return str(tabulate(rows, ["host memory", "GiB", "bytes/parameter"], tablefmt="simple", disable_numparse=True,
                        colalign=("left", "right", "right")))


def _weights_of_parts(planner: Planner) -> dict[str, int]:
    """Bytes of the weights, each once, of experts, of everything else in layers, and outside of layers."""
    captured = planner.captured
    experts = {call.sources[position].name for call in captured.calls[1:-1]
               for position in captured.templates[call.template].inputs_of_experts()}
    layers = {source.name for call in captured.calls[1:-1] for source in call.sources}
    found = {"experts": 0, "the rest": 0, "vocabulary": 0}
    for layout in planner.tiling.layouts.values():
        for s in layout.slices:
            part = "experts" if s.name in experts else "the rest" if s.name in layers else "vocabulary"
            found[part] += s.count * layout.dtype.itemsize
    return found


def _active_shares(planner: Planner) -> dict[str, float]:
    """The share of parameters that a token uses, for the tiles of layers with experts."""
    assert planner.simulator is not None, "nothing is known of the machine"
    shares: dict[str, float] = {}
    for call in planner.captured.calls[1:-1]:
        work = planner.simulator.durations.work(call.template, "forward")
        if not work.grouped_flops:
            continue
        tiles = planner.tiling.tiles_of[call.name]
        products = float((work.gemm_flops + work.float8_flops + work.grouped_flops).subs({BATCH: 1, LENGTH: 1})) / 2
        there = sum(planner.tiling.layouts[tile].parameters for tile in tiles)
        shares.update(dict.fromkeys(tiles, min(1.0, products / there)))
    return shares


def _table(found: Sequence[Candidate], chosen: Plan, operations: int, layers: Sequence[str]) -> str:
    """`operations`: of a step, for each token."""
    rows: list[tuple[object, ...]] = []
    for each in found:
        plan, times = each.plan, each.times
        size = f"{min(plan.micro_batches)} to {max(plan.micro_batches)}" if plan.lengths else str(plan.micro_batches[0])
        chunked = f" ({plan.token_chunk} tokens at a time)" if plan.token_chunk else ""
        sizes = (plan.checkpoint_interval, f"{size}{chunked}", plan.waves,
                 kept_residuals(plan.saved_layers, plan.residuals),
                 len(plan.from_host(layers)), len(plan.host_sums),
                 " + ".join([str(len(plan.resident_state)), *(f"{len(tiles)} {what}" for what, tiles in (
                     ("visit", plan.visiting_state), ("held", plan.held_state)) if tiles)]),
                 "after weights" if plan.deferred_moments else "",
                 f"{each.device_bytes / 2**30:.1f}", f"{each.host_bytes / 2**30:.1f}")
        if times is None:
            rows.append(("", *sizes, "does not fit", "", "", "", ""))
            continue
        critical = sorted(((seconds, lane) for lane, seconds in times.critical_s.items()), reverse=True)
        parts = ", ".join(f"{lane} {seconds / times.step_s:.0%}" for seconds, lane in critical
                          if seconds >= 0.01 * times.step_s)
        rows.append(("->" if plan == chosen else "", *sizes, f"{times.step_s:.3f}",
                     f"{operations * plan.tokens / times.step_s / 1e12:.3g}", f"{times.occupancy(Lane.COMPUTE):.0%}",
                     str(times.binds), parts))
    header = ["", "K", "micro-batch", "waves", "saved layers", "host checkpoints", "host sums", "updated there", "moments",
              "device GiB", "host GiB", "step s", "TFLOPS", "compute busy", "binds", "critical"]
    return str(tabulate(rows, header, tablefmt="simple", disable_numparse=True, colalign=(
        "left", *["right"] * 13, "left", "left")))
