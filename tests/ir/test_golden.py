"""Golden schedules: whole texts of compiled programs, compared as strings.

`pytest tests/ir/test_golden.py --update-golden` rewrites them. Read the diff: it shows how a pass changed
the schedules.
"""
from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megacompile.ir.placement import Placements
from megacompile.ir.plan import Plan
from megacompile.ir.text import parse
from megacompile.passes import PIPELINE
from megacompile.passes.pipeline import Compiled, compile_program
from megacompile.verify.verifier import verify

FOLDER = Path(__file__).resolve().parents[1] / "golden"
EVERY_TILE = ("prologue", "layers.0", "layers.1", "layers.2", "layers.3", "epilogue")

#: File name -> the plan of a model of four layers.
GOLDENS: dict[str, dict[str, Any]] = {
    "streamed_k1_three_micro_batches": {"micro_batches": (2, 2, 1), "weight_slots": 2},
    "streamed_k4_one_micro_batch": {"checkpoint_interval": 4, "weight_slots": 4},
    "resident_k2_three_micro_batches": {"checkpoint_interval": 2, "micro_batches": (2, 2, 1), "resident": EVERY_TILE},
    "slab_pool_k2_one_micro_batch": {"checkpoint_interval": 2, "weight_slots": 3, "pinned": False, "gradient_slabs": 2},
    "updated_on_the_device_k1_two_micro_batches": {
        "micro_batches": (1, 1), "resident": ("prologue", "layers.0"), "resident_state": ("prologue", "layers.0")},
    "updates_on_arrival_k2_two_micro_batches": {
        "checkpoint_interval": 2, "weight_slots": 3, "micro_batches": (1, 1), "update": "arrival",
        "resident": ("layers.0", "layers.1"), "resident_state": ("layers.0",)},
    "whole_step_updated_on_the_device": {
        "whole_step": True, "resident": ("prologue", "layers.0"), "resident_state": ("prologue", "layers.0")},
    "whole_step_visiting_the_device": {
        "whole_step": True, "resident": ("prologue", "layers.1"), "resident_state": ("prologue",),
        "visiting_state": ("layers.1", "layers.2", "epilogue")},
    "moments_after_all_weights_k1_two_micro_batches": {
        "micro_batches": (1, 1), "deferred_moments": True, "resident": ("prologue", "layers.0"),
        "resident_state": ("prologue",), "visiting_state": ("layers.2",)},
    "whole_step_updates_on_arrival": {
        "whole_step": True, "update": "arrival", "resident": ("layers.0", "layers.1"), "resident_state": ("layers.0",)},
    "whole_step_moments_on_disk": {
        "whole_step": True, "disk_state": ("prologue", "layers.0", "layers.2", "layers.3"), "state_slabs": 2,
        "resident": ("layers.2",)},
    "whole_step_moments_on_disk_after_weights": {
        "whole_step": True, "disk_state": ("prologue", "layers.0", "layers.2"), "state_slabs": 1, "deferred_moments": True},
    "updates_on_arrival_moments_on_disk": {
        "micro_batches": (1, 1), "update": "arrival", "disk_state": ("layers.0", "layers.1", "layers.3"), "state_slabs": 1},
    "checkpoints_on_the_host_k1_two_micro_batches": {"micro_batches": (2, 1), "host_checkpoints": 2},
    "whole_step_checkpoints_on_the_host_two_waves": {
        "checkpoint_interval": 2, "weight_slots": 3, "micro_batches": (1, 1, 1), "waves": 2, "whole_step": True,
        "host_checkpoints": 1},
    "whole_step_two_waves_added_up_on_the_host": {
        "micro_batches": (1, 1), "waves": 2, "whole_step": True, "host_sums": ("layers.1", "epilogue")},
    "outputs_k2_two_micro_batches": {"outputs": True, "checkpoint_interval": 2, "weight_slots": 3, "micro_batches": (1, 1)},
    "whole_step_held_for_the_update_two_waves": {
        "micro_batches": (1, 1), "waves": 2, "whole_step": True, "resident": ("prologue", "layers.1"),
        "resident_state": ("prologue",), "held_state": ("layers.1", "layers.2", "epilogue")},
    "whole_step_k1_two_waves": {"checkpoint_interval": 1, "micro_batches": (1, 1), "waves": 2, "whole_step": True},
}

Schedules = Callable[..., Compiled]


def plan_of(name: str) -> Plan:
    """The plan of `make_schedule(**GOLDENS[name])`."""
    options = {"micro_batches": (1,), **GOLDENS[name]}
    for name in ("whole_step", "outputs"):
        options.pop(name, None)
    return Plan.of(sum(options["micro_batches"]), 8, **options)


@pytest.mark.parametrize("name", GOLDENS)
def test_schedule_is_as_agreed(name: str, make_schedule: Schedules, pytestconfig: pytest.Config) -> None:
    text, path = make_schedule(**GOLDENS[name]).program.text(), FOLDER / f"{name}.txt"
    if pytestconfig.getoption("--update-golden"):
        path.write_text(text)
    agreed = path.read_text()
    difference = difflib.unified_diff(agreed.splitlines(), text.splitlines(), "agreed", "now", n=1, lineterm="")
    assert text == agreed, "\n".join([f"{name} has changed (--update-golden rewrites it)", *difference])


def test_every_golden_file_is_compared() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(GOLDENS)


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_parses_back_to_a_program_that_verifies(name: str, make_schedule: Schedules) -> None:
    program = parse((FOLDER / f"{name}.txt").read_text())
    verify(program)
    assert program == make_schedule(**GOLDENS[name]).program


@pytest.mark.parametrize("name", GOLDENS)
def test_passes_change_no_program_and_repeat_themselves(name: str, make_schedule: Schedules) -> None:
    """Pure: what went into a pass is the same after it and after all that follow; same in, same out."""
    compiled = make_schedule(**GOLDENS[name])
    programs, texts = [compiled.stages["model"]], [compiled.stages["model"].text()]
    for each in PIPELINE:
        programs.append(each.run(programs[-1], plan_of(name)))
        texts.append(programs[-1].text())
    for program, text in zip(programs, texts, strict=True):
        assert program.text() == text, f"a later pass has changed the program of stage {program.stage}"
        assert compiled.stages[program.stage].text() == text, f"stage {program.stage} differs from run to run"


@pytest.mark.parametrize("name", GOLDENS)
def test_names_and_order_of_tiles_decide_nothing(name: str, make_schedule: Schedules) -> None:
    """With tiles renamed, so that their alphabetical order is reversed, and listed backwards: the same sections."""
    compiled = make_schedule(**GOLDENS[name])
    new = {old: f"{'zyxwvu'[i]}{old[1:]}" for i, old in enumerate(EVERY_TILE)}  # of one length: text is aligned
    model = compiled.stages["model"]
    renamed = model.evolve(
        tiles={new[t.name]: replace(t, name=new[t.name]) for t in reversed(model.tiles.values())},
        calls=tuple(replace(c, tiles=tuple(new[t] for t in c.tiles)) for c in model.calls))
    plan = plan_of(name)
    placements = Placements({new[tile]: placement for tile, placement in plan.placements.items()})
    program = compile_program(renamed, replace(plan, placements=placements), PIPELINE).program
    assert program.slots == compiled.program.slots
    assert list(program.sections) == list(compiled.program.sections)
    for section in program.sections:
        text = program.text(section)
        for old, other in new.items():
            text = text.replace(other, old)
        assert text == compiled.program.text(section)
