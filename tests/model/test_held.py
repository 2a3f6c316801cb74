"""Tiles that the device holds from their last backward until they are updated have the bits of host updates."""
from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import engine
import pytest
import tiny_models
from tiny_models import assert_torn, batch, cut_power, replanned, same_bits, state_of
from torch import Tensor

import megacompile
from megacompile.errors import MegacompileError
from megacompile.ir.placement import Placements
from megacompile.ir.plan import Plan
from megacompile.ir.program import Lane, argument, find, op_of

ROWS = 6
OPS = ("hold", "fetch_held", "update_held", "return_weights", "return_state")


shared = tiny_models.in_each_dtype


def planned(shared: tiny_models.Shared, **options: Any) -> Any:
    return replanned(shared, **{"waves": 3, **options})


def step(model: Any, optimizer: Any, seed: int) -> None:
    model.megacompile.train_step(batch(seed, rows=ROWS), optimizer)


def trained(model: Any, delay: Callable[[Lane], None] | None = None, **options: Any) -> dict[str, Tensor]:
    """Weights and optimizer state after four clipped whole steps, and one of a loop."""
    engine.delay(model, delay)
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, eps=1e-4, max_grad_norm=1.0, **options)
    for seed in range(3):
        step(model, optimizer, seed)
    model(**batch(3, rows=ROWS)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step(model, optimizer, 4)
    return state_of(model, optimizer)


@pytest.fixture(scope="module")
def at_home(shared: tiny_models.Shared) -> dict[str, Tensor]:
    return trained(planned(shared))


@pytest.mark.parametrize("options", [
    {"held_state": "all"}, {"held_state": ("prologue", "model.layers.1", "epilogue"), "deferred_moments": True},
    {"held_state": "all", "resident_state": ("model.layers.0",), "resident": ("model.layers.2",)}], ids=str)
def test_held_tiles_get_the_bits_of_updates_on_the_host(options: dict[str, Any], shared: tiny_models.Shared,
                                                        at_home: dict[str, Tensor]) -> None:
    model = planned(shared, **options)
    assert same_bits(trained(model), at_home)
    program = engine.trained(model).program
    there = set(options.get("resident_state", ()))
    named = set(engine.tiles(model)) if options["held_state"] == "all" else {*options["held_state"]}
    for op in OPS:
        found = [argument(n, "tile") for section in ("train_step", "update") for n in find(program.section(section), op)]
        assert sorted(found) == sorted(named - there), op
    engine.executor(model).idle()
    assert not engine.arena(model).held, "their memory is theirs no longer"


def test_a_step_with_held_tiles_moves_no_other_state(shared: tiny_models.Shared) -> None:
    """What stays on the device would leave it with every step if memory of held tiles counted as slots that are not there."""
    model = planned(shared, held_state=("model.layers.1", "epilogue"), resident_state=("model.layers.0",))
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    step(model, optimizer, 0)
    engine.executor(model).idle()
    moved: list[str] = []
    engine.probe(model, lambda node: moved.append(op_of(node).name) if op_of(node).name.endswith("_state") else None)
    for seed in range(1, 4):
        step(model, optimizer, seed)
    model.megacompile.synchronize()
    assert Counter(moved)["return_state"] == 3 * 2 and moved.count("fetch_state") == 0
    assert moved.count("store_state") <= 1, "once, when the caller synchronizes"


@pytest.mark.parametrize("dtype", ["bfloat16", "8bit"])
def test_moments_in_other_formats_have_the_same_bits(dtype: str, shared: tiny_models.Shared) -> None:
    expected = trained(planned(shared), state_dtype=dtype)
    assert same_bits(trained(planned(shared, held_state="all"), state_dtype=dtype), expected)


@pytest.mark.sample(2)
@pytest.mark.parametrize("straggler", [Lane.H2D, Lane.CPU, Lane.D2H, Lane.COMPUTE])
def test_late_lanes_change_no_bit(straggler: Lane, shared: tiny_models.Shared, at_home: dict[str, Tensor]) -> None:
    draw = random.Random(str(straggler))

    def delay(lane: Lane) -> None:
        if draw.random() < (0.2 if lane == straggler else 0.02):
            time.sleep(draw.random() * 2e-3)

    model = planned(shared, held_state=("prologue", "model.layers.0", "model.layers.2"))
    assert same_bits(trained(model, delay), at_home)


@pytest.mark.parametrize(("op", "number"), [("return_weights", 2), ("return_weights", 5), ("return_state", 1),
                                            ("return_state", 3)])
def test_an_update_that_stops_is_completed(op: str, number: int, shared: tiny_models.Shared) -> None:
    """Tiles that were updated on the device return from there. The host updates the others."""
    def run(fails: bool) -> dict[str, Tensor]:
        model = planned(shared, held_state="all")
        optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
        step(model, optimizer, 5)
        model.megacompile.synchronize()
        if fails:
            cut_power(model, op, number)
        step(model, optimizer, 0)
        if fails:
            assert_torn(model)
            optimizer.step()
        step(model, optimizer, 1)
        return state_of(model, optimizer)

    assert same_bits(run(fails=True), run(fails=False))


def test_gradients_that_are_not_finite_leave_held_tiles_as_they_were(shared: tiny_models.Shared) -> None:
    model = planned(shared, held_state="all")
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0, non_finite="skip")
    step(model, optimizer, 0)
    before = state_of(model, optimizer)
    with mock.patch.object(engine.backend(model), "norms", lambda views, out: out.fill_(float("nan"))):
        step(model, optimizer, 1)
        model.megacompile.synchronize()
    assert same_bits(state_of(model, optimizer), before)


@pytest.mark.parametrize("options", [{"update": "arrival"}, {"ranks": 2}], ids=str)
def test_plans_that_hold_tiles_elsewhere_than_in_whole_steps_of_one_process_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(MegacompileError, match="held_state needs updates at the end of a step, and one process"):
        Plan(2, 8, (1, 1), placements=Placements.named(held_state=("a",)), **options)
