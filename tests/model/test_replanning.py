"""Another plan between two steps changes nothing else, and the last plan's memory is freed."""
from __future__ import annotations

from typing import Any

import engine
import pytest
import tiny_models
import torch
from tiny_models import Shared, same_bits, state_of, train_step, weights
from torch.multiprocessing.reductions import StorageWeakRef

import megacompile
from megacompile.errors import MegacompileError
from megacompile.streaming.residency import Residency

#: Each step under another plan: options, and a field of the plan with the value that they give it.
PLANS: tuple[tuple[dict[str, Any], str, Any], ...] = (
    (dict(checkpoint_interval=2), "checkpoint_interval", 2), (dict(resident="all"), "resident_state", ()),
    (dict(resident=(), resident_state="all", saved_layers=2), "saved_layers", 2),
    (dict(resident_state=None, saved_layers=None, host_checkpoints=True), "host_checkpoints", 2),
    (dict(checkpoint_interval=1, weight_slots=1), "weight_slots", 1))


shared = tiny_models.shared_in_module(micro_batch_size=2)


def test_training_under_one_plan_after_another_gives_the_bits_of_training_under_one(shared: Shared) -> None:
    found = []
    for changing in (False, True):
        model = shared.fresh()
        optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
        train_step(model, optimizer)
        for options, name, value in PLANS:
            if changing:
                model.megacompile.replan(**options)
            train_step(model, optimizer)
            assert not changing or getattr(model.megacompile.plan, name) == value
        model.megacompile.synchronize()
        found.append(weights(model))
    assert same_bits(*found)
    shared.model.megacompile.replan(checkpoint_interval=None, weight_slots=None, host_checkpoints=None)


def test_what_the_last_plan_took_is_given_back(shared: Shared) -> None:
    model = shared.fresh()
    model.megacompile.replan(resident_state="all", host_checkpoints=True)
    train_step(model, megacompile.AdamW(model.parameters()))
    handle = model.megacompile
    before = handle.stats
    assert before["slot_bytes"] and before["checkpoint_bytes"] and before["shapes"]
    handle.replan(resident_state=None, host_checkpoints=None)
    after = handle.stats
    assert (after["slot_bytes"], after["checkpoint_bytes"], after["shapes"]) == (0, 0, 0)
    train_step(model, megacompile.AdamW(model.parameters()))
    assert 0 < handle.stats["slot_bytes"] < before["slot_bytes"] and not handle.stats["checkpoint_bytes"]


def test_memory_that_the_last_plan_took_goes_back_to_the_device(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """No slot is held by a lane, a view or a step that is over, and the backend is told when all of them are gone: the
    next plan finds the device as a first one does."""
    model = shared.fresh()
    model.megacompile.replan(resident_state="all", checkpoint_interval=2)
    train_step(model, megacompile.AdamW(model.parameters()))
    slots = {name: StorageWeakRef(slot.untyped_storage()) for name, slot in engine.arena(model).slots.items()}
    held: list[str] = []
    monkeypatch.setattr(engine.backend(model), "trim", lambda: held.extend(
        ["nothing", *(name for name, slot in slots.items() if not slot.expired())]), raising=False)
    model.megacompile.replan(resident_state=None, checkpoint_interval=None)
    assert slots and held == ["nothing"]


@pytest.mark.nightly(held_by=(
    "tests/model/test_replanning.py::test_training_under_one_plan_after_another_gives_the_bits_of_training_under_one",
    "tests/model/test_replanning.py::test_state_stays_on_the_device_when_a_larger_batch_needs_larger_slots"))
def test_slots_of_another_shape_are_given_back_where_they_would_be_over_the_budget() -> None:
    """Those of a large batch, whose blocks are several layers' weights, beside a small batch that needs all there is."""
    model = megacompile.stream(tiny_models.build(num_hidden_layers=6), device="cpu", micro_batch_size=1)
    handle = model.megacompile
    small, *larger = (tiny_models.batch(rows=rows, length=64) for rows in range(24, 30))
    try:
        handle.replan(device_memory=handle.compiled(small).estimate.total)
        least = handle.compiled(small).plan.weight_slots
        large = next(batch for batch in larger if handle.compiled(batch).plan.weight_slots > least)
        optimizer = megacompile.AdamW(model.parameters())
        for batch in (large, small):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            estimate = handle.compiled(batch).estimate
            assert engine.arena(model).device_bytes() + estimate.total - estimate.slots <= engine.planner(model).device_bytes
    finally:
        handle.close()


def test_state_stays_on_the_device_when_a_larger_batch_needs_larger_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    model = megacompile.stream(tiny_models.build(), device="cpu", resident_state="all", host_checkpoints=True)
    native = tiny_models.build()
    moved: list[str] = []
    run = Residency._run
    monkeypatch.setattr(Residency, "_run", lambda self, *ran: (moved.append(ran[1]), run(self, *ran)))
    optimizers = [megacompile.AdamW(model.parameters()), torch.optim.AdamW(native.parameters())]
    try:
        taken = []
        for rows in (2, 6, 2):
            for each, optimizer in zip((model, native), optimizers, strict=True):
                each(**tiny_models.batch(rows=rows)).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            taken.append(engine.arena(model).device_bytes())
        assert taken[0] < taken[1] == taken[2] and moved == ["load"]
        model.megacompile.synchronize()
        for name, parameter in native.named_parameters():
            torch.testing.assert_close(model.get_parameter(name), parameter, rtol=0, atol=1e-6)
    finally:
        model.megacompile.close()


def test_moments_that_nothing_has_written_begin_as_zeros_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not read: the system would have to make their pages first."""
    found = []
    for resident in (None, "all"):
        model = megacompile.stream(tiny_models.build(), device="cpu", resident_state=resident)
        optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
        made = engine.backend(model).memory
        monkeypatch.setattr(engine.backend(model), "memory", lambda size, made=made: made(size).fill_(63))
        for tile in engine.store(model).tiles.values() if resident else ():
            tile.allocate_moments()
            for moment in tile.moments:
                moment.numpy().fill(1)  # PyTorch does not see this write
        train_step(model, optimizer)
        found.append(state_of(model, optimizer))
        model.megacompile.close()
    assert same_bits(*found)


def test_a_plan_stays_within_the_memory_that_it_is_given_last(shared: Shared) -> None:
    model = shared.fresh()
    model.megacompile.replan(device_memory="1KiB")
    with pytest.raises(MegacompileError, match="device_memory"):
        train_step(model, megacompile.AdamW(model.parameters()))
    model.megacompile.replan(device_memory=None)
    train_step(model, megacompile.AdamW(model.parameters()))


@pytest.mark.parametrize(("options", "message"), [
    (dict(dtype=torch.bfloat16), "cannot change dtype: it changes checkpoint_interval"),
    (dict(checkpoint_interval=0), "checkpoint_interval must be"),
    (dict(resident=("no",)), "resident names no, which are not tiles")])
def test_what_no_plan_knows_is_refused_and_changes_nothing(shared: Shared, options: dict[str, Any], message: str) -> None:
    model = shared.fresh()
    before = engine.config(model)
    with pytest.raises(MegacompileError, match=message):
        model.megacompile.replan(**options)
    assert engine.config(model) is before


def test_between_a_forward_and_the_end_of_its_step_plans_stay(shared: Shared) -> None:
    model = shared.fresh()
    optimizer = megacompile.AdamW(model.parameters())
    ids = torch.randint(0, 64, (2, 8))
    loss = model(input_ids=ids, labels=ids).loss
    with pytest.raises(MegacompileError, match="a loss waits for its backward"):
        model.megacompile.replan(checkpoint_interval=2)
    loss.backward()
    with pytest.raises(MegacompileError, match="gradients wait for their step"):
        model.megacompile.replan(checkpoint_interval=2)
    optimizer.step()
    optimizer.zero_grad()
    model.megacompile.replan(checkpoint_interval=2)
    model.megacompile.replan(checkpoint_interval=None)


def test_what_other_models_have_planned_counts_for_the_default_budget_alone(shared: Shared) -> None:
    other, trained = (megacompile.stream(shared.native(), device="cpu") for _ in range(2))
    before = engine.planner(other).taken_bytes  # by models of other tests
    train_step(trained, megacompile.AdamW(trained.parameters()))
    other.megacompile.replan(device_memory="1GiB")
    assert (engine.planner(other).taken_bytes, engine.planner(other).device_bytes) == (0, 1 << 30)
    other.megacompile.replan(device_memory=None)
    estimate = trained.megacompile.compiled().estimate
    assert engine.planner(other).taken_bytes - before == estimate.total - estimate.slots > 0
    trained.megacompile.close()
    other.megacompile.close()
