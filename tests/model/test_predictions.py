"""Predicted = measured: every row of `benchmarks/results/` whose hardware has a profile."""
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from counted import python_calls
from predictions import steady
from shapes import config
from step import left_out
from torch import fx

import megacompile
from megacompile.ir.placement import LISTS, Placements
from megacompile.ir.plan import Plan, split
from megacompile.ir.program import op_of
from megacompile.predict.durations import Durations
from megacompile.predict.hardware import PROFILES, Hardware
from megacompile.predict.simulate import simulate
from megacompile.scheduling import Schedule

ROOT = Path(__file__).resolve().parents[2]
SHAPE = ("qwen2-7b", 28)
Row = dict[str, Any]


def rows_of_shapes() -> dict[tuple[str, int], list[Row]]:
    """Rows by shape and layers: all of the 7B shape, of others the last of each kind, since their profiles and kernels have
    changed. `experts.jsonl` has the newer rows of a mixture: its older ones are of another form of experts."""
    known = {Hardware.load(path).name for path in PROFILES.glob("*.json")}
    found: dict[tuple[str, int], list[Row]] = {}
    for file in ("step.jsonl", "experts.jsonl"):
        of_file: dict[tuple[str, int], dict[str, Row]] = {}
        for line in (ROOT / "benchmarks/results" / file).read_text().splitlines():
            row = json.loads(line)
            options = row.get("options", {})
            # Simulations know nothing of synchronous optimizers. The other options are of another model, or of its state.
            if row["system"] == "megacompile" and row["device"] in known \
                    and not options.keys() & {"synchronous_optimizer", "lora", "optim"}:
                shape = row["shape"], row["layers"]
                of_file.setdefault(shape, {})[line if shape == SHAPE else json.dumps(options)] = row
        found |= {shape: [*rows.values()] for shape, rows in of_file.items()}
    return found


ROWS = rows_of_shapes()


def label(row: Row) -> str:
    given = [f"{row['batch']}x{row['length']}", f"K{row['checkpoint_interval']}", f"saved {row['saved_layers']}"]
    given += [name for name in ("compute_only", "train_step", "overlap") if row.get(name)]
    return " ".join([*given, *(f"{row['waves']} waves" for _ in [0] if row.get("waves", 1) > 1)])


@pytest.fixture(scope="module", ids=lambda shape: "{}-{}".format(*shape), params=[
    pytest.param(shape, marks=() if shape == SHAPE else pytest.mark.nightly) for shape in ROWS])
def measured(request: pytest.FixtureRequest) -> tuple[Schedule, list[Row]]:
    """A shape's schedule and its rows."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        bare = AutoModelForCausalLM.from_config(config(*request.param), dtype=torch.bfloat16)
    first = ROWS[request.param][0]
    return megacompile.schedule(bare, batch=first["batch"], length=first["length"], hardware="h200", host_memory="256GiB",
                                saved_layers=0), ROWS[request.param]


def is_compiled(row: Row) -> bool:
    return not row.get("options", {}).get("uncompiled", False)


def plan_of(row: Row) -> Plan:
    return Plan(row["batch"], row["length"], split(row["batch"], row["micro_batch"]), row["checkpoint_interval"],
                row["saved_layers"], row["weight_slots"], waves=row.get("waves", 1),
                placements=Placements.named(**{name: row.get(name, ()) for name in LISTS}),
                update="arrival" if row.get("overlap") else "step", deferred_moments=row.get("deferred_moments", False),
                host_checkpoints=row.get("host_checkpoints", 0), update_order=tuple(row.get("update_order", ())),
                token_chunk=row.get("token_chunk", 0), residuals=row.get("residuals", "all"))


def test_there_are_rows_to_hold_predictions_against() -> None:
    assert len(ROWS[SHAPE]) >= 2


@pytest.mark.nightly(held_by="tests/model/test_planner.py::test_what_is_predicted_holds_what_is_measured")
def test_predicted_steps_are_within_a_tenth_of_what_was_measured(measured: tuple[Schedule, list[Row]]) -> None:
    """All rows in one test: each process that has some of them would capture the model. `pytest -s` shows all of them."""
    model, rows = measured
    assert model.planner.simulator is not None
    simulated: dict[tuple[Any, ...], float] = {}
    hardware = model.durations().hardware
    durations = {fused: Durations(model.captured, model.tiling.layouts, hardware, fused) for fused in (True, False)}
    wrong = []
    for row in filter(steady, rows):
        plan, whole, alone = plan_of(row), row.get("train_step", False), row.get("compute_only", False)
        key = plan, whole, alone, is_compiled(row)
        if key not in simulated:
            program = model.planner.simulator.program(plan, whole)
            seconds = durations[is_compiled(row)].of(program, plan)

            def duration(node: fx.Node, seconds: Callable[[fx.Node], float] = seconds, alone: bool = alone) -> float:
                return 0.0 if alone and left_out(op_of(node)) else seconds(node)

            simulated[key] = simulate(program, duration, hardware.speeds).step_s
        predicted = simulated[key]
        print(f"{label(row)} at {row['commit']}: {predicted:.3f} s for {row['step_s']:.3f}")
        if predicted != pytest.approx(row["step_s"], rel=0.1):
            wrong.append(f"{label(row)} at {row['commit']}: predicted {predicted:.3f} s, measured {row['step_s']:.3f}")
    assert not wrong


@pytest.mark.nightly(held_by="tests/model/test_planner.py::test_what_is_predicted_holds_what_is_measured")
def test_predicted_device_bytes_are_within_a_twentieth_and_never_under(measured: tuple[Schedule, list[Row]]) -> None:
    model, rows = measured
    wrong = []
    for row in rows:
        planner = replace(model.planner, fused=is_compiled(row))
        predicted = planner.estimate(plan_of(row)).total / 2**30
        print(f"{label(row)} at {row['commit']}: {predicted:.2f} GiB for {row['peak_device_gib']:.2f}")
        if not row["peak_device_gib"] <= predicted <= 1.05 * row["peak_device_gib"]:
            wrong.append(f"{label(row)} at {row['commit']}: {predicted:.2f} GiB for {row['peak_device_gib']:.2f}")
    assert not wrong


@pytest.mark.nightly(held_by="tests/model/test_planner.py::test_what_is_predicted_holds_what_is_measured")
def test_a_large_program_is_simulated_in_no_time(measured: tuple[Schedule, list[Row]]) -> None:
    model, _ = measured
    model.simulate()  # costs are found at the first use
    with python_calls() as calls:
        timeline = model.simulate()
    assert calls[0] < 100 * max(3000, len(timeline.items)), "they cost more the more instructions there are"
