"""Moments updated after all weights: the bits of whole updates, also if a step stops between both; and when plans defer."""
from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import engine
import pytest
import tiny_models
from tiny_models import assert_torn, batch, cut_power, same_bits, state_of
from torch import Tensor, fx

import megacompile
from megacompile.errors import LaneError, MegacompileError, NonFiniteError, TornError
from megacompile.ir.plan import Plan
from megacompile.ir.program import argument, find, op_of
from megacompile.predict.hardware import Hardware
from megacompile.scheduling import Schedule

ROWS = 6
DEFERRED: dict[str, Any] = {"deferred_moments": True, "resident": ("prologue", "model.layers.0"),
                            "resident_state": ("prologue",), "visiting_state": ("model.layers.1",)}


shared = tiny_models.shared_in_module(bf16=True, micro_batch_size=2)


def planned(shared: tiny_models.Shared, **options: Any) -> Any:
    """The model as it was made, under another plan."""
    model = shared.fresh()
    model.megacompile.replan(**{"visiting_state": (), "resident_state": (), "resident": (), "waves": 1,
                                "deferred_moments": False, **options})
    return model


def trained(model: Any, whole: bool, probe: Callable[[fx.Node], None] | None = None) -> dict[str, Tensor]:
    """Weights and optimizer state after four clipped steps, of two backwards each where they are a loop's."""
    engine.probe(model, probe)
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, eps=1e-4, max_grad_norm=1.0)
    for seed in range(4):
        if whole:
            model.megacompile.train_step(batch(seed, rows=ROWS), optimizer)
            continue
        for part in (seed, seed + 100):
            model(**batch(part, rows=ROWS)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model, optimizer)


@pytest.fixture(scope="module")
def at_once(shared: tiny_models.Shared) -> dict[bool, dict[str, Tensor]]:
    """By whether steps are whole."""
    return {whole: trained(planned(shared), whole) for whole in (False, True)}


# ---- bits ------------------------------------------------------------------------------------------------------------

@pytest.mark.sample(3)
@pytest.mark.parametrize("whole", [False, True], ids=["loop", "train_step"])
@pytest.mark.parametrize("late", [None, "update_weights", "update_moments", "offload"])
def test_moments_updated_after_all_weights_have_the_bits_of_whole_updates(
        whole: bool, late: str | None, shared: tiny_models.Shared, at_once: Any) -> None:
    model = planned(shared, **DEFERRED)
    assert same_bits(trained(model, whole, lambda node: time.sleep(3e-3 * (op_of(node).name == late))), at_once[whole])
    updates = engine.trained(model).program.section("update")
    weights = [argument(node, "tile") for node in find(updates, "update_weights")]
    assert weights == ["model.layers.0", "model.layers.2", "epilogue"]
    assert [argument(node, "tile") for node in find(updates, "update_moments")] == weights[::-1]


def test_the_next_forward_waits_for_weights_and_the_next_gradients_for_moments(shared: tiny_models.Shared) -> None:
    model = planned(shared, deferred_moments=True)
    seen: list[tuple[str, str | None]] = []

    def probe(node: fx.Node) -> None:
        if op_of(node).name == "update_moments":
            time.sleep(0.02)
        seen.append((op_of(node).name, argument(node, "tile")))

    trained(model, False, probe)
    begun = [i for i, (op, _) in enumerate(seen) if op == "update_moments"]
    assert any(op == "loss" for op, _ in seen[begun[0]:begun[-1]]), "no forward ran beside the moments"
    moments: set[str | None] = set()
    waiting: set[str | None] = set()
    for op, tile in seen:
        if op == "update_weights":
            waiting.add(tile)
        elif op == "update_moments":
            waiting.discard(tile)
            moments.add(tile)
        elif op in ("offload", "accumulate"):
            assert tile not in waiting, f"gradients of {tile} came before its moments were made of those before"
    assert len(moments) == 5 and not waiting


# ---- failures --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("op", ["update_weights", "update_moments"])
def test_an_update_that_stops_half_way_is_completed(op: str, shared: tiny_models.Shared) -> None:
    def run(fails: bool) -> dict[str, Tensor]:
        model = planned(shared, **DEFERRED)
        optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
        if fails:
            cut_power(model, op, 2)
        model(**batch(0, rows=ROWS)).loss.backward()
        optimizer.step()
        if fails:
            assert_torn(model)
            optimizer.step()
        return state_of(model, optimizer)

    assert same_bits(run(True), run(False))


def test_the_first_weights_alone_make_a_step_torn(shared: tiny_models.Shared) -> None:
    """Its moments are those of before, so that running it anew would be another step."""
    model = planned(shared, deferred_moments=True)
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
    model(**batch(0, rows=ROWS)).loss.backward()
    names: list[str] = []

    def probe(node: fx.Node) -> None:
        names.append(op_of(node).name)
        if names.count("update_weights") == 2:
            raise RuntimeError("power cut")

    engine.probe(model, probe)
    optimizer.step()
    with pytest.raises(LaneError):
        model.megacompile.synchronize()
    engine.probe(model, None)
    assert "update_moments" not in names
    with pytest.raises(TornError):
        model(**batch(1, rows=ROWS))
    assert all(state["step"] == 1 for state in optimizer.state.values()), "a step that has begun is counted"


def test_gradients_that_are_not_finite_leave_weights_and_moments(shared: tiny_models.Shared) -> None:
    model = planned(shared, deferred_moments=True)
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
    model(**batch(0, rows=ROWS)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    before = state_of(model, optimizer)
    (model(**batch(1, rows=ROWS)).loss * float("nan")).backward()
    optimizer.step()
    with pytest.raises(NonFiniteError):
        model.megacompile.synchronize()
    assert same_bits(state_of(model, optimizer), before)


# ---- plans -----------------------------------------------------------------------------------------------------------

def schedule(parameters_a_second: float, whole_step: bool = True, **options: Any) -> Schedule:
    """For an H200 whose host updates so fast."""
    hardware = dataclasses.replace(Hardware.find("h200"), adam=parameters_a_second)
    options = {"batch": 16, "length": 256, "saved_layers": 0, "visiting_state": (), "resident_state": (), **options}
    return megacompile.schedule(tiny_models.build(bf16=True, hidden_size=64, intermediate_size=128, num_hidden_layers=8),
                                whole_step=whole_step, hardware=hardware, **options)


@pytest.mark.nightly(
    held_by="tests/model/test_deferral.py::test_moments_updated_after_all_weights_have_the_bits_of_whole_updates")
@pytest.mark.parametrize("whole_step", [False, True])
def test_moments_are_deferred_where_a_step_waits_for_the_host_and_can_hide_them(whole_step: bool) -> None:
    speed = 2e8  # weights hold up the forward, and moments are done before gradients come
    chosen = schedule(speed, whole_step)
    simulator = chosen.planner.simulator
    assert chosen.plan.deferred_moments and simulator is not None
    seconds = {deferred: simulator.cautious_s(dataclasses.replace(chosen.plan, deferred_moments=deferred), whole_step)
               for deferred in (True, False)}
    assert seconds[True] < 0.95 * seconds[False]
    assert "after weights" in chosen.explain()


@pytest.mark.nightly(
    held_by="tests/model/test_deferral.py::test_moments_updated_after_all_weights_have_the_bits_of_whole_updates")
@pytest.mark.parametrize(("speed", "options"), [
    (1e13, {}), (1e6, {}), (2e8, {"deferred_moments": False}), (2e8, {"update": "arrival"})],
    ids=["a fast host", "a host that nothing hides", "not wanted", "on arrival"])
def test_none_are_deferred_where_it_gains_nothing_or_is_not_wanted(speed: float, options: dict[str, Any]) -> None:
    assert not schedule(speed, **options).plan.deferred_moments


def test_deferred_moments_are_for_the_end_of_a_step(shared: tiny_models.Shared) -> None:
    with pytest.raises(MegacompileError, match="not on arrival"):
        Plan(2, 8, micro_batches=(2,), update="arrival", deferred_moments=True)
    with pytest.raises(MegacompileError, match="deferred_moments must be True or False"):
        megacompile.schedule(tiny_models.build(), batch=2, length=8, deferred_moments="later")
    model = planned(shared, deferred_moments=True)
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, overlap="backward")
    tiny_models.train_step(model, optimizer)
    assert not model.megacompile.plan.deferred_moments and model.megacompile.plan.update == "arrival"
