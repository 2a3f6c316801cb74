"""The planner's estimates, which never build a program, against the programs that the passes make of random plans."""
from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from plans import plan_of, schedules
from test_memory import LENGTH, Loops, hold_slots, hold_values
from torch import nn

import megacompile
from megacompile.ir.ops import TEMPLATE_OPS
from megacompile.ir.placement import LISTS
from megacompile.ir.plan import Plan
from megacompile.ir.program import Program, argument, find, op_of, slot_family
from megacompile.planning.memory import host_parts, slot_parts
from megacompile.planning.planner import Planner


def decoder(frozen_layers: int = 0) -> nn.Module:
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
                         num_key_value_heads=1, max_position_embeddings=64)
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    frozen: list[Any] = [model.model.embed_tokens, *model.model.layers[:frozen_layers]] if frozen_layers else []  # type: ignore[union-attr, index]
    for module in frozen:
        module.requires_grad_(False)
    return model


@pytest.fixture(scope="module", params=[
    ("decoder", 1), ("frozen below", 1), ("layers that run twice", 1), ("decoder", 2), ("frozen below", 4),
    ("layers that run twice", 2)], ids=lambda param: f"{param[0]}, {param[1]} GPUs")
def planner(request: pytest.FixtureRequest) -> Planner:
    kind, gpus = request.param
    with torch.device("meta"):
        model = Loops() if kind == "layers that run twice" else decoder(2 if kind == "frozen below" else 0)
    return megacompile.schedule(model, batch=1, length=LENGTH, hardware="h200", gpus=gpus).planner


def of_this_model(planner: Planner, schedule: dict[str, Any]) -> Plan:
    """A drawn plan with the tiles of this model in the place of those that it names."""
    layouts = planner.tiling.layouts
    named = {f"layers.{i}": tile for i, tile in enumerate(t for t in layouts if "logue" not in t)}
    tiles = {}
    for key in (*LISTS, "update_order"):
        there = dict.fromkeys(tile for each in schedule[key] if (tile := named.get(each, each)) in layouts)
        tiles[key] = tuple(tile for tile in there if key == "resident" or layouts[tile].trainable)
    if planner.tiling.ranks > 1:
        tiles["held_state"] = ()  # only one process holds tiles
    return replace(plan_of(schedule | tiles), output="logits" if schedule["outputs"] else "loss", ranks=planner.tiling.ranks)


def templates_s(planner: Planner, program: Program, plan: Plan) -> float:
    """Seconds of all templates that the program runs."""
    assert planner.simulator is not None
    runs = Counter((argument(n, "template"), op_of(n).name, program.micro_batches[argument(n, "mb")])
                   for graph in program.sections.values() for n in find(graph, *TEMPLATE_OPS))
    seconds = planner.simulator.durations.seconds
    return sum(count * sum(seconds(template, op, rows, plan.length, plan.token_chunk, plan.residuals))
               for (template, op, rows), count in runs.items())


def test_estimates_are_those_of_the_program(planner: Planner) -> None:
    """Templates run as often as counted, slots, accumulators and host memory take what is estimated, and no step is faster than
    its bound."""
    @settings(max_examples=12, derandomize=True, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))
    @given(schedules(layers=4, often=False))
    def of_any_plan(schedule: dict[str, Any]) -> None:
        plan, whole_step, simulator = of_this_model(planner, schedule), schedule["whole_step"], planner.simulator
        assert simulator is not None
        program = simulator.program(plan, whole_step)
        assert math.isclose(simulator.compute_s(plan), templates_s(planner, program, plan)), plan
        assert simulator.at_least(plan, may_defer=False) <= simulator.cautious_s(plan, whole_step) * (1 + 1e-9), plan
        hold_slots(slot_parts(planner.captured, planner.tiling, plan), program, alike=False)
        hold_values(planner, plan, program)
        stated = host_parts(planner.captured, planner.tiling, plan)
        stashed = sum(slot.bytes for name, slot in program.slots.items() if slot_family(name) == "H")
        assert stated["checkpoints"] == plan.ranks * stashed, plan
        summed = {argument(n, "tile") for graph in program.sections.values() for n in find(graph, "add_to_sum")}
        assert stated["sums"] == sum(planner.tiling.layouts[tile].sum_bytes for tile in summed), plan

    of_any_plan()
