"""Programs edited by hand: printed together with what they are made for and their plan, and loaded back for the same model.

    text = model.megacompile.text(batch)                   # program.shape(...) and program.plan(...) are in its head
    model.megacompile.load_program(edited)                 # verified, then used for such batches
    model.megacompile.unload_program()                     # back to the compiled program

An edit may change the schedule: the order of nodes, slots, events and waits, when a value is released, what is fetched again.
The plan decides what the program computes and what stays on the device from step to step; a text that disagrees with it is
refused. The verifier proves the rest, together with all other programs of the model.
"""
from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from torch import fx

from megacompile.errors import InsufficientMemoryError, ProgramError, listed, shortened
from megacompile.frontend.batches.pair_masks import argument as argument_of
from megacompile.ir.ops import TEMPLATE_OPS
from megacompile.ir.places import Family
from megacompile.ir.plan import BatchSpec, Plan
from megacompile.ir.precision import precision_text
from megacompile.ir.program import SLOT_KINDS, STAGES, Program, argument, find, op_of, slot_family
from megacompile.ir.text import parse_with_plan, print_program, source_text
from megacompile.passes.pipeline import Compiled, run_pass
from megacompile.planning.memory import Estimate
from megacompile.sizes import format_bytes
from megacompile.streaming.programs.executables import Executable, Executables
from megacompile.verify.ordering import kept_slots
from megacompile.verify.updates import summed_tiles
from megacompile.verify.verifier import verify

#: Kinds of values whose slots are host buffers.
_ON_HOST = frozenset({"staging", "slab", "stashed"})


def editable_text(compiled: Executable) -> str:
    """A program as text, with its spec and plan."""
    return print_program(compiled.program, made_for=(compiled.spec, compiled.plan))


def load(source: str | Path, executables: Executables, others: Iterable[Program]) -> Executable:
    """Parses an edited program, and proves that it is safe to run for its spec. Changes nothing. Raises `ProgramError` with
    line and column if it does not parse, with the program around the fault if it does not verify, or if its model, spec or
    plan do not fit; `InsufficientMemoryError`; `UnsupportedError`."""
    program, spec, plan = parse_with_plan(source_text(source))
    if spec is None or plan is None:
        raise ProgramError("the text does not say what the program was made for: print it with model.megacompile.text(batch), "
                           "which declares program.shape(...) and program.plan(...)")
    if program.stage != STAGES[-1]:
        raise ProgramError(f"the program is of stage {program.stage} and has no events yet: print the last stage, {STAGES[-1]}")
    _check_declared(executables, spec, plan)
    spec = replace(spec, capture=executables.captures.known_key_at(spec.capture, spec.length))
    model = executables.model_program(spec, plan)
    _same_model(program, model)
    _check_size(program, model)
    verify(program, others)
    unedited = model
    for each in executables.planner.config.passes:
        unedited = run_pass(each, unedited, plan)
    _same_purpose(program, unedited)
    estimate = _estimate(program, executables, spec, plan)
    _check_host(program, unedited, executables, spec, plan)
    return Executable(spec, plan, estimate, Compiled({program.stage: program}), loaded=True)


def _check_declared(executables: Executables, spec: BatchSpec, plan: Plan) -> None:
    """Raises `ProgramError` for a spec or a plan that this model cannot have."""
    if plan.update != spec.update:
        raise ProgramError(f'the plan has update="{plan.update}", but the shape has "{spec.update}": write the same in both')
    if plan.output != spec.output:
        raise ProgramError(f'the plan has output="{shortened(plan.output)}", but the shape has "{shortened(spec.output)}": '
                           "write the same in both")
    _check_groups(spec, plan)
    further, parameters = [argument_of(each) for each in spec.capture.further], executables.captured.forward_arguments
    if len(set(further)) < len(further) or not parameters.issuperset(further):
        raise ProgramError(f"the shape has the additional batch arguments {listed(further)}: name each once, from "
                           f"{listed(sorted(parameters))}")
    if (images := spec.capture.images) != 1 and not executables.captured.image_positions:
        raise ProgramError(f"the shape has {images} images for each sequence, and this model takes none: leave images=1")
    layers, tiles = len(executables.captured.calls) - 2, list(executables.tiling.layouts)
    if unknown := sorted({*plan.resident, *plan.visiting_state, *plan.held_state}.difference(tiles)):
        raise ProgramError(f"the plan has {listed(unknown)} on the device, which are not tiles of this model: it has "
                           f"{listed(tiles)}")
    trained = [tile for tile, layout in executables.tiling.layouts.items() if layout.trainable]
    if plan.update_order and sorted(plan.update_order) != sorted(trained):
        raise ProgramError("update_order must be empty or name each trained tile once: leave it out, or name "
                           f"{listed(trained)}")
    if unknown := sorted(set(plan.host_sums).difference(tiles)):
        raise ProgramError(f"the plan adds up gradients of {listed(unknown)} on the host, which are not tiles of this model: "
                           f"it has {listed(tiles)}")
    if sorted(plan.disk_state) != sorted(executables.tiling.on_disk):
        raise ProgramError(f"the plan has the optimizer state of {listed(plan.disk_state) or 'no tile'} on disk, and this "
                           f"model that of {listed(sorted(executables.tiling.on_disk)) or 'no tile'}: print the program again "
                           "with model.megacompile.text(batch)")
    if plan.saved_layers > layers:
        raise ProgramError(f"the plan keeps residuals of {plan.saved_layers} layers, and the model has {layers}: print the "
                           "program again with model.megacompile.text(batch)")


def _check_groups(spec: BatchSpec, plan: Plan) -> None:
    """Raises `ProgramError` for groups that no batch has, and for micro-batches that cut off tokens of their groups."""
    counts = spec.group_rows
    if counts and (len(counts) != len(spec.group_lengths) or sum(counts) != spec.batch
                   or max(spec.group_lengths) != spec.length) or (spec.group_lengths and not counts):
        raise ProgramError(f"groups of {shortened(str(counts))} rows with {shortened(str(spec.group_lengths))} tokens are not "
                           f"those of a batch of {spec.batch} x {spec.length}: leave the shape as printed")
    wanted = [length for rows, length in spec.groups for _ in range(rows)]
    given = [length for rows, length in plan.sizes for _ in range(rows)]
    if any(map(operator.lt, given, wanted)):
        raise ProgramError(f"the plan's lengths {shortened(str(plan.lengths))} cut off tokens of the shape's groups: leave "
                           "them as printed")


def _check_size(program: Program, model: Program) -> None:
    """Raises `ProgramError` for a program with fewer nodes than its micro-batches need. This bounds the program that the passes
    compile from the plan for comparison: it is never much larger than the given text."""
    least = len(program.micro_batches) * len(model.calls)
    if sum(_computed(graph).total() for graph in program.sections.values()) < least:
        raise ProgramError(f"the program has {len(program.micro_batches):,} micro-batches and does not compute each call for "
                           "each of them: leave the micro-batches, and what is computed, as printed")


def _same_model(program: Program, unedited: Program) -> None:
    """Raises `ProgramError` unless precision, tiles and calls are this model's."""
    if program.precision != unedited.precision:
        given, due = (shortened(precision_text(each.precision)) for each in (program, unedited))
        raise ProgramError(f"the program is for precision={given}, but this model is streamed with precision={due}: print this "
                           "model's with model.megacompile.text(batch), or stream with the program's precision")
    for what, ours, theirs in (("tile", dict(program.tiles), dict(unedited.tiles)),
                               ("call", {c.name: c for c in program.calls}, {c.name: c for c in unedited.calls})):
        for name in dict.fromkeys((*ours, *theirs)):
            if ours.get(name) != theirs.get(name):
                raise ProgramError(
                    f"the program is of another model: {what} {shortened(name)} is "
                    f"{shortened(str(ours.get(name, 'not there')))}, but of this model "
                    f"{shortened(str(theirs.get(name, 'there is none')))}: print this model's with "
                    "model.megacompile.text(batch)")
    if [c.name for c in program.calls] != [c.name for c in unedited.calls]:
        raise ProgramError("the program's calls are in another order than the model's: leave declarations as they are printed")


def _same_purpose(program: Program, unedited: Program) -> None:
    """Raises `ProgramError` unless the program has the sections that the runtime runs, computes what the plan says in each, and
    keeps on the device what the plan says."""
    if set(program.sections) != set(unedited.sections):
        raise ProgramError(f"the program has sections {listed(program.sections)}, but its plan needs "
                           f"{listed(unedited.sections)}: add or drop none")
    for name, graph in unedited.sections.items():
        planned, given = _computed(graph), _computed(program.section(name))
        for what, how in ((given - planned, "runs"), (planned - given, "does not run")):
            for op, call, mb in what:
                raise ProgramError(f"section {name} {how} {op} of {call} for micro-batch {mb}, unlike its plan: leave the "
                                   "plan, and what is computed, as printed")
        if summed_tiles(program, name) != summed_tiles(unedited, name):
            raise ProgramError(f"section {name} and its plan add up gradients of different tiles on the host: leave the "
                               "add_to_sum lines as printed")
    kept, due = kept_slots(program), kept_slots(unedited)
    for slot in dict.fromkeys((*kept, *due)):
        if kept.get(slot) != due.get(slot):
            raise ProgramError(f"slot {slot} keeps {kept.get(slot, 'nothing')} on the device, but by the plan "
                               f"{due.get(slot, 'nothing')}: stream with other `resident` tiles instead")


def _computed(graph: fx.Graph) -> Counter[tuple[str, str, int]]:
    """The templates that a section runs: op, call and micro-batch."""
    return Counter((op_of(n).name, str(argument(n, "call")), int(argument(n, "mb"))) for n in find(graph, *TEMPLATE_OPS))


def _estimate(program: Program, executables: Executables, spec: BatchSpec, plan: Plan) -> Estimate:
    """The plan's estimate, with the program's own slots. Raises `InsufficientMemoryError` if it exceeds the device's budget."""
    planner = executables.planner_for(spec.capture)
    planned = planner.estimate(plan, spec.training)
    estimate = replace(planned, slots=max(planned.slots, _slot_bytes(program, on_host=False)))
    if estimate.total + planner.margin_bytes > planner.device_bytes:
        raise InsufficientMemoryError(
            f"the program needs {format_bytes(estimate.total + planner.margin_bytes)} of device memory, slots of "
            f"{format_bytes(estimate.slots)} among it, and {format_bytes(planner.device_bytes)} are available: use fewer slots")
    return estimate


def _check_host(program: Program, unedited: Program, executables: Executables, spec: BatchSpec, plan: Plan) -> None:
    """Raises `InsufficientMemoryError` if the program's slabs exceed the plan's by more than the host has left."""
    planner = executables.planner_for(spec.capture)
    more = _slot_bytes(program, on_host=True) - _slot_bytes(unedited, on_host=True)
    left = planner.host_bytes_left - sum(planner.host_parts(plan).values())
    if more > left:
        raise InsufficientMemoryError(
            f"the program has {format_bytes(more)} more of slabs in host memory than its plan, and "
            f"{format_bytes(max(0, left))} are left: use fewer or smaller slabs")


def _slot_bytes(program: Program, on_host: bool) -> int:
    """Bytes of the slots on the device, or of the slabs on the host. Held tiles count as accumulators do."""
    return sum(slot.bytes for slot in program.slots.values() if slot_family(slot.name) != Family.HELD
               and on_host == bool(_ON_HOST.intersection(SLOT_KINDS.get(slot_family(slot.name), ()))))
