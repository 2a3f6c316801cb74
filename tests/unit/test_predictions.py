"""Predicted = measured: every row of `benchmarks/results/` that was taken on hardware of which there is a profile."""
from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import megacompile
from megacompile.bench.shapes import config
from megacompile.bench.step import left_out
from megacompile.durations import Durations
from megacompile.hardware import PROFILES, Hardware
from megacompile.plan import Plan, split
from megacompile.program import op_of
from megacompile.schedule import Schedule
from megacompile.simulate import simulate

ROOT = Path(__file__).resolve().parents[2]
SHAPE, LAYERS = "qwen2-7b", 28


def steady(row: dict[str, Any]) -> bool:
    """A row whose last steps agree: one that was still warming up says nothing."""
    a, b = row["times_s"][-2:]
    return abs(a - b) < 0.02 * b


def rows() -> list[dict[str, Any]]:
    known = {Hardware.load(path).name for path in PROFILES.glob("*.json")}
    found = map(json.loads, (ROOT / "benchmarks/results/step.jsonl").read_text().splitlines())
    ours = [r for r in found if r["system"] == "megacompile" and r["device"] in known
            and not r.get("options", {}).get("synchronous_optimizer")]  # which simulations know nothing of
    return [r for r in ours if (r["shape"], r["layers"]) == (SHAPE, LAYERS) and steady(r)]


def label(row: dict[str, Any]) -> str:
    given = [f"{row['batch']}x{row['length']}", f"K{row['checkpoint_interval']}", f"saved {row['saved_layers']}"]
    given += [name for name in ("compute_only", "train_step", "overlap") if row.get(name)]
    return " ".join([*given, *(f"{row['waves']} waves" for _ in [0] if row.get("waves", 1) > 1)])


@pytest.fixture(scope="module")
def model() -> Schedule:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        bare = AutoModelForCausalLM.from_config(config(SHAPE), dtype=torch.bfloat16)
    return megacompile.schedule(bare, batch=64, length=1024, hardware="h200", saved_layers=0)


def is_compiled(row: dict[str, Any]) -> bool:
    return not row.get("options", {}).get("uncompiled", False)


def plan_of(row: dict[str, Any]) -> Plan:
    return Plan(row["batch"], row["length"], split(row["batch"], row["micro_batch"]), row["checkpoint_interval"],
                row["saved_layers"], row["weight_slots"], resident=tuple(row["resident"]), waves=row.get("waves", 1),
                resident_state=tuple(row.get("resident_state", ())), update="arrival" if row.get("overlap") else "step",
                visiting_state=tuple(row.get("visiting_state", ())), deferred_moments=row.get("deferred_moments", False),
                host_checkpoints=row.get("host_checkpoints", 0), update_order=tuple(row.get("update_order", ())),
                token_chunk=row.get("token_chunk", 0), host_sums=tuple(row.get("host_sums", ())))


def test_there_are_rows_to_hold_predictions_against() -> None:
    assert len(rows()) >= 2


def test_predicted_steps_are_within_a_tenth_of_what_was_measured(model: Schedule) -> None:
    """All rows in one test: each process that has some of them would capture the model. `pytest -s` shows all of them."""
    assert model.planner.pace is not None
    simulated: dict[tuple[Any, ...], float] = {}
    hardware = model.durations().hardware
    durations = {fused: Durations(model.captured, model.tiling.layouts, hardware, fused) for fused in (True, False)}
    wrong = []
    for row in rows():
        plan, whole, alone = plan_of(row), row.get("train_step", False), row.get("compute_only", False)
        key = plan, whole, alone, is_compiled(row)
        if key not in simulated:
            program = model.planner.pace.program(plan, whole)
            seconds = durations[is_compiled(row)].of(program, plan.length)

            def duration(node: fx.Node, seconds: Callable[[fx.Node], float] = seconds, alone: bool = alone) -> float:
                return 0.0 if alone and left_out(op_of(node)) else seconds(node)

            simulated[key] = simulate(program, duration, hardware.speeds).step_s
        predicted = simulated[key]
        print(f"{label(row)} at {row['commit']}: {predicted:.3f} s for {row['step_s']:.3f}")
        if predicted != pytest.approx(row["step_s"], rel=0.1):
            wrong.append(f"{label(row)} at {row['commit']}: predicted {predicted:.3f} s, measured {row['step_s']:.3f}")
    assert not wrong


def test_predicted_device_bytes_are_within_a_twentieth_and_never_under(model: Schedule) -> None:
    wrong = []
    for row in rows():
        planner = replace(model.planner, fused=is_compiled(row))
        predicted = planner.estimate(plan_of(row), row["length"]).total / 2**30
        if not row["peak_device_gib"] <= predicted <= 1.05 * row["peak_device_gib"]:
            wrong.append(f"{label(row)} at {row['commit']}: {predicted:.2f} GiB for {row['peak_device_gib']:.2f}")
    assert not wrong


def test_a_large_program_is_simulated_in_no_time(model: Schedule) -> None:
    model.simulate()  # costs are found at the first use
    begin = time.perf_counter()
    model.simulate()
    assert time.perf_counter() - begin < 2.0  # 0.1 s on a quiet machine
