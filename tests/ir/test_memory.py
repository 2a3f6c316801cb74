"""The memory that a plan states, against a walk over its program: a value lives from its node to its last use.

The walk ignores `release` and slots. It uses only the readers and the size of each value. What is equal byte for byte, and what
is only a bound, stands in `docs/decisions/0064-memory-estimates.md`."""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from machine import Instruction, instructions, kind_of, subject
from oracle import result_bytes
from plans import plan_of, schedules
from torch import nn

import megacompile
from megacompile.ir.placement import LISTS
from megacompile.ir.places import Family, SlotName
from megacompile.ir.plan import Plan
from megacompile.ir.program import Program, model_program
from megacompile.passes import PIPELINE
from megacompile.passes.pipeline import Compiled, run_pass
from megacompile.planning.memory import planned_calls, slot_parts, training_moments
from megacompile.planning.planner import Planner
from megacompile.predict import cost
from megacompile.scheduling import Schedule

#: Kinds of slots in host memory.
_HOST = ("S", "D", "H", "M")
_BETWEEN_SECTIONS = ("release", "record", "wait", "leave")
LENGTH = 8


def walk(section: list[Instruction], size: Callable[[Instruction], int], alive: dict[tuple[Any, ...], int],
         ) -> Iterator[tuple[Instruction, int]]:
    """Each node and the bytes of the values that live when it runs, its own not among them. `alive`: those of earlier
    sections by lease; what this section keeps is put there."""
    last = {name: at for at, each in enumerate(section) if each.op not in _BETWEEN_SECTIONS
            for names in each.takes.values() for name in names}
    made = {each.name: each for each in section}
    here: dict[str, int] = {}
    for at, each in enumerate(section):
        if each.op == "leased":
            here[each.name] = alive.pop(subject(each), 0)
        yield each, sum(here.values()) + sum(alive.values())
        if each.op == "lease":
            (value,) = each.takes["value"]
            alive[subject(made[value])] = here.pop(value, 0)
        elif last.get(each.name, -1) > at:
            here.setdefault(each.name, size(each))
        for name in [name for name in here if last.get(name, -1) <= at]:
            del here[name]


def slots_needed(program: Program, section: list[Instruction]) -> int:
    """Bytes of the values that take turns in device slots, at their peak."""
    def size(each: Instruction) -> int:
        kind = kind_of(each.says.get("into", "%"))
        return result_bytes(program, each) if kind and kind not in _HOST and not kind.startswith("R") else 0
    return max((live + size(each) for each, live in walk(section, size, {})), default=0)


def slots_stated(program: Program) -> tuple[int, int]:
    """Bytes of device slots: those that values take turns in, and those of what stays."""
    sizes = [(kind_of(name), slot.bytes) for name, slot in program.slots.items() if kind_of(name) not in _HOST]
    return (sum(size for kind, size in sizes if not kind.startswith("R")),
            sum(size for kind, size in sizes if kind.startswith("R")))


@pytest.mark.parametrize("several", [False, True], ids=["one rank", "several ranks"])
def test_slots_hold_what_lives_at_once(make_schedule: Callable[..., Compiled], several: bool) -> None:
    @settings(max_examples=30, derandomize=True, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))
    @given(schedules(several=several))
    def of_any_plan(schedule: dict[str, Any]) -> None:
        program, plan = make_schedule(**schedule).program, plan_of(schedule)
        turns, stays = slots_stated(program)
        for graph in program.sections.values():
            assert slots_needed(program, instructions(graph)) <= turns
        tiles = [program.tiles[tile] for tile in plan.resident]
        there = [program.tiles[tile] for tile in plan.resident_state]
        kept = sum(tile.gradient_bytes for tile in there) if plan.update == "step" else 0  # the tiles here have no norms
        shares = sum(tile.state_bytes for tile in there) + kept
        held = sum(program.tiles[tile].weight_bytes + program.tiles[tile].gradient_bytes + program.tiles[tile].state_bytes
                   for tile in plan.held_state if schedule["whole_step"])
        assert stays == sum(tile.weight_bytes for tile in tiles) + shares // plan.ranks + held

    of_any_plan()


# Predictions for a model that was captured

@pytest.fixture(scope="module", params=[1, 2, 4], ids="{} GPUs".format)
def model(request: pytest.FixtureRequest) -> Schedule:
    return planned_for(request.param)


def planned_for(gpus: int, **options: Any) -> Schedule:
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
                         num_key_value_heads=1, max_position_embeddings=64)
    with torch.device("meta"):
        bare: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return megacompile.schedule(bare.train(), batch=1, length=LENGTH, gpus=gpus, **options)


class Loops(nn.Module):
    """Three layers, each run twice; two share a matrix that is wider than a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 64), nn.Linear(64, 64)
        self.layers = nn.ModuleList(Shares(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(3))
        self.layers[2].down = self.layers[0].down

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(input_ids)
        for layer in (*self.layers, *self.layers):
            x = layer(x)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class Shares(nn.Module):
    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@pytest.fixture(scope="module", params=[1, 2], ids="{} GPUs".format)
def loops(request: pytest.FixtureRequest) -> Schedule:
    with torch.device("meta"):
        bare = Loops()
    return megacompile.schedule(bare, batch=1, length=LENGTH, gpus=request.param)


def compiled(model: Schedule, plan: Plan, whole_step: bool) -> Program:
    outputs = plan.output != "loss"
    program = model_program(planned_calls(model.captured, model.tiling, plan), model.tiling.tiles(), plan.batch, not outputs,
                            whole_step, differentiable=outputs)
    for each in PIPELINE:
        program = run_pass(each, program, plan)
    return program


#: Slots that the passes never make fewer or smaller than the formula says.
EXACT = (Family.FETCHED_CHECKPOINTS, Family.VISITING, Family.MOMENTUM, Family.RESIDENT, Family.UPDATED_WEIGHTS,
         Family.UPDATED_STATE, Family.UPDATED_GRADIENTS)
#: Slots that tiles take turns in. A section with fewer tiles than slots makes fewer, and a slot is as large as its own tiles.
IN_TURN = (Family.WEIGHTS, Family.GRADIENTS, Family.WEIGHT_SHARDS)


def slots_by_family(program: Program, as_largest: bool = False) -> Counter[str]:
    """Bytes of slots. `as_largest`: layers' tiles that take turns count as large as the largest of their size class."""
    names = {text: name for text in program.slots if (name := SlotName.parse(text)) is not None}
    largest: Counter[SlotName] = Counter()
    found: Counter[str] = Counter()
    for text, name in names.items():
        group = replace(name, number=0)
        largest[group] = max(largest[group], program.slots[text].bytes)
    for text, name in names.items():
        found[name.family] += (largest[replace(name, number=0)] if as_largest and not name.boundary
                               else program.slots[text].bytes)
    return found


@dataclass
class Needed:
    """Bytes at one moment, each at its own peak: of accumulators and of activations that outlive an op, of an op's own values;
    and of all three together."""

    accumulators: int = 0
    activations: int = 0
    op: int = 0
    together: int = 0


def moment_of(model: Schedule | Planner, plan: Plan, each: Instruction) -> str:
    """The moment of the formulas to which an op of a template belongs."""
    calls = model.captured.calls_for(plan.output)
    recomputed = plan.recomputed([call.name for call in model.tiling.differentiated(calls)])
    backward = each.op in ("backward", "recompute_backward")
    match each.says["call"]:
        case name if name == calls[-1].name:
            return "epilogue" if backward else each.op
        case "prologue":
            return "prologue" if backward else "forward"
        case name if name in recomputed:
            return "forward" if each.op == "forward" else "recompute"
    return "backward" if backward else "forward"


def needed(model: Schedule | Planner, plan: Plan, program: Program) -> dict[str, Needed]:
    """What a step needs at each moment, beside slots."""
    templates, tiling = model.captured.templates, model.tiling

    def rows(each: Instruction) -> int:
        return program.micro_batches[each.says["mb"]]

    def sum_bytes(each: Instruction) -> int:
        return 4 * tiling.layouts[each.says["tile"]].elements if each.op == "zeros" else 0

    def value_bytes(each: Instruction) -> int:
        if each.op == "output_gradient":
            return cost.output_bytes(templates[plan.output], rows(each), LENGTH)
        if "template" not in each.says:
            return 0
        template = templates[each.says["template"]]
        if each.op in ("forward", "forward_saving", "outputs"):
            return cost.output_bytes(template, rows(each), LENGTH) + (residuals(each) if each.op == "forward_saving" else 0)
        layer = model.captured.calls[1].template  # the gradient of hidden states
        return cost.output_bytes(templates[layer], rows(each), LENGTH)

    def residuals(each: Instruction) -> int:
        (template,) = (templates[call.template] for call in program.calls if call.name == each.says["call"])
        return cost.residual_bytes(template, rows(each), LENGTH)

    sums: dict[tuple[Any, ...], int] = {}
    values: dict[tuple[Any, ...], int] = {}
    found: defaultdict[str, Needed] = defaultdict(Needed)
    for name in ("train_step", "forward", "backward"):
        section = instructions(program.section(name)) if name in program.sections else []
        # Tiles that the step before held may be there until sums need their memory.
        held = returning = sum(result_bytes(program, each) for each in section if each.op == "hold")
        for (each, added), (_, live) in zip(walk(section, sum_bytes, sums), walk(section, value_bytes, values), strict=True):
            if each.op == "zeros" and returning:
                held, returning = held - min(returning, sum_bytes(each)), max(0, returning - sum_bytes(each))
            held += result_bytes(program, each) if each.op == "hold" else 0
            if "template" in each.says:
                added += held
                template = templates[each.says["template"]]
                own = max(value_bytes(each), cost.peak_bytes(template, template.variant(each.op), rows(each), LENGTH))
                here = found[moment_of(model, plan, each)]
                here.accumulators, here.activations = max(here.accumulators, added), max(here.activations, live)
                here.op, here.together = max(here.op, own), max(here.together, added + live + own)
    return found


def hold_values(model: Schedule | Planner, plan: Plan, program: Program) -> None:
    """Holds the formulas of accumulators, activations and ops to a program."""
    moments = training_moments(model.captured, model.tiling, plan)
    for name, here in needed(model, plan, program).items():
        stated = moments[name]
        # Tiles that are held are counted there beyond the residuals that were freed before them.
        assert plan.held_state or here.accumulators <= stated.accumulators, (name, plan)
        # Of two waves, neither has all sums that stay between waves at once. With waves on several ranks, another tile's sum
        # may or may not still be on its way.
        if (plan.waves == 1 or (plan.waves > 2 and plan.processes == 1)) and not plan.held_state:
            assert here.accumulators == stated.accumulators, (name, plan)
        # Outputs and their gradient belong to the caller, and what a block keeps is counted with its op.
        if plan.output == "loss" and (name != "recompute" or plan.checkpoint_interval == 1):
            assert here.activations == stated.checkpoints, (name, plan)
            assert here.op == stated.workspace, (name, plan)
        assert here.together <= stated.accumulators + stated.checkpoints + stated.workspace, (name, plan)


def test_slots_and_values_are_those_of_the_program(model: Schedule) -> None:
    of_any_plan(model, layers=4, examples=30, alike=True)


def test_slots_and_values_of_layers_that_run_twice_and_share_are_those_of_the_program(loops: Schedule) -> None:
    assert [len(loops.tiling.tiles_of[call.name]) for call in loops.captured.calls] == [1, 2, 1, 2, 2, 1, 2, 1]
    of_any_plan(loops, layers=4, examples=15, alike=False)


def test_slots_of_matrices_that_ranks_share_are_those_of_the_program() -> None:
    found = planned_for(2, optim="muon")
    stated = slot_parts(found.captured, found.tiling, found.plan)
    assert stated[Family.MOMENTUM] > max(layout.weight_bytes for layout in found.tiling.layouts.values() if layout.has_matrices)
    hold_slots(stated, found.program(), alike=True)


def of_any_plan(model: Schedule, layers: int, examples: int, alike: bool) -> None:
    """`alike`: the tiles of each size class have one size."""
    names = {f"layers.{i}": tile for i, tile in enumerate(t for t in model.tiling.layouts if "logue" not in t)}

    @settings(max_examples=examples, derandomize=True, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))
    @given(schedules(layers=layers, often=False))
    def walked(schedule: dict[str, Any]) -> None:
        output, ranks = "logits" if schedule["outputs"] else "loss", model.tiling.ranks
        schedule = schedule if ranks == 1 else {**schedule, "held_state": ()}  # only one process holds tiles
        tiles = {key: tuple(dict.fromkeys(tile for tile in (names.get(t, t) for t in schedule[key])
                                          if tile in model.tiling.layouts)) for key in (*LISTS, "update_order")}
        plan = replace(plan_of(schedule | tiles), output=output, ranks=ranks)
        program = compiled(model, plan, schedule["whole_step"])
        hold_slots(slot_parts(model.captured, model.tiling, plan), program, alike)
        hold_values(model, plan, program)

    walked()


def hold_slots(stated: dict[Family, int], program: Program, alike: bool) -> None:
    made, at_most = slots_by_family(program), slots_by_family(program, as_largest=True)
    assert {family: made[family] for family in EXACT} == {family: stated[family] for family in EXACT}
    for family in IN_TURN:
        if "train_step" in program.sections:  # which has as many arrivals as the formula counts
            assert at_most[family] == stated[family], (family, program.slots)
        assert made[family] <= at_most[family] <= stated[family], (family, program.slots)
        assert not alike or made[family] == at_most[family], (family, program.slots)
    assert {*EXACT, *IN_TURN} == {*stated}
