"""`AdamW(overlap="backward")` in the plain loop: a backward that updates as gradients arrive, and what such a loop refuses."""
from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import engine
import pytest
import tiny_models
import torch
from tiny_models import batch, same_bits, weights
from torch import fx

import megacompile
from megacompile.errors import LaneError, LeaseError, MegacompileError, TornError
from megacompile.ir.program import op_of

#: A loop alternates between two shapes, the first in three micro-batches.
SHAPES = ({"rows": 6, "length": 9}, {"rows": 2, "length": 5})
STEPS = 4


def late_lanes(lane: Any) -> None:
    time.sleep(random.random() * 5e-4)


def loop(overlap: str | None, bf16: bool, delayed: bool, **options: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights and losses of a loop with a schedule of learning rates, and an evaluation in each step."""
    model = megacompile.stream(tiny_models.build(bf16), device="cpu", micro_batch_size=2, **options)
    if delayed:
        engine.delay(model, late_lanes)
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, eps=1e-4, overlap=overlap)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    losses = []
    for seed in range(STEPS):
        loss = model(**batch(seed, **SHAPES[seed % 2])).loss
        loss.backward()
        assert overlap is None or all(p.grad is None for p in model.parameters())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses += [loss.item(), model.eval()(**batch(9)).loss.item()]
        model.train()
    assert ("update" in model.megacompile.program(batch(0, **SHAPES[0])).sections) == (overlap is None)
    found = weights(model)
    assert all(int(state["step"]) == STEPS for state in optimizer.state.values())
    model.megacompile.close()
    return found, losses


@pytest.fixture(scope="module")
def unclipped() -> Callable[[bool], Any]:
    """An ordinary loop, by dtype."""
    found: dict[bool, Any] = {}

    def get(bf16: bool) -> Any:
        if bf16 not in found:
            found[bf16] = loop(None, bf16, delayed=False)
        return found[bf16]

    return get


@pytest.mark.sample(5)
@pytest.mark.parametrize(("bf16", "options"), [
    (False, {}), (True, {}), (False, {"checkpoint_interval": 2, "pinned_memory": "32KiB"}), (True, {"resident": "all"}),
    (False, {"resident_state": "all"}), (True, {"resident_state": ("prologue", "model.layers.1"), "pinned_memory": "32KiB"}),
    (True, {"reference": True, "saved_layers": 1}), (False, {"checkpoint_interval": 2, "resident": ("model.layers.1",)}),
    (True, {"host_checkpoints": True}), (False, {"host_checkpoints": 1, "pinned_memory": "32KiB"})],
    ids=str)
def test_updates_on_arrival_in_the_loop_give_the_bits_of_an_unclipped_loop(
        bf16: bool, options: dict[str, Any], unclipped: Any) -> None:
    """With lanes that are late at random, two shapes in turn, a schedule of learning rates and evaluations between."""
    ours, losses = loop("backward", bf16, delayed="reference" not in options, **options)
    theirs, expected = unclipped(bf16)
    assert same_bits(ours, theirs) and losses == expected


@pytest.fixture
def optimizer(model: Any) -> megacompile.AdamW:
    return megacompile.AdamW(model.parameters(), lr=1e-2, overlap="backward")


def step(model: Any, optimizer: Any, seed: int = 0) -> None:
    model(**batch(seed)).loss.backward()
    optimizer.step()


# ---------------------------------------------------------------- what a step is

def test_the_backward_updates_and_the_step_only_ends_the_step(model: Any, optimizer: Any) -> None:
    start = weights(model)
    optimizer.step()
    assert same_bits(weights(model), start), "there was no backward"
    model(**batch(0)).loss.backward()
    after = weights(model)
    assert not any(torch.equal(after[name], start[name]) for name in start)
    optimizer.step()
    optimizer.step()
    assert same_bits(weights(model), after)
    assert all(state["step"] == 1 for state in optimizer.state.values()) and optimizer.grad_norm is None


def test_the_step_returns_before_the_update_is_done(model: Any, optimizer: Any) -> None:
    step(model, optimizer)
    model.megacompile.synchronize()
    released = threading.Event()

    def hold(node: fx.Node) -> None:
        assert op_of(node).name != "update" or released.wait(30), "the step waits for an update"

    engine.probe(model, hold)
    model(**batch(1)).loss.backward()
    optimizer.step()
    assert engine.updating(model).segments and not engine.updating(model).done
    released.set()
    model.megacompile.synchronize()
    assert engine.updating(model).done == set(engine.updating(model).segments)


def test_hyper_parameters_are_those_of_the_start_of_the_backward(model: Any) -> None:
    optimizer = megacompile.AdamW(model.parameters(), lr=0.0, overlap="backward")
    start = weights(model)
    loss = model(**batch(0)).loss
    loss.backward()
    optimizer.param_groups[0]["lr"] = 1e-2
    optimizer.step()
    assert same_bits(weights(model), start)
    loss = model(**batch(1)).loss
    loss.backward()
    assert not same_bits(weights(model), start)


def test_a_closure_makes_a_whole_step(model: Any, optimizer: Any) -> None:
    def closure() -> torch.Tensor:
        loss = model(**batch(0)).loss
        loss.backward()
        return loss

    start = weights(model)
    losses = [optimizer.step(closure).item() for _ in range(2)]
    assert losses[1] < losses[0] and not same_bits(weights(model), start)
    assert all(state["step"] == 2 for state in optimizer.state.values())


def test_a_closure_after_a_backward_that_has_updated_is_refused(model: Any, optimizer: Any) -> None:
    """So do trainers accumulate gradients: some backwards, and the last one in a closure. None of it may count twice."""
    def closure() -> torch.Tensor:
        loss = model(**batch(1)).loss
        loss.backward()
        return loss

    model(**batch(0)).loss.backward()
    once = weights(model)
    with pytest.raises(LeaseError, match="give the whole batch to one forward"):
        optimizer.step(closure)
    assert same_bits(weights(model), once)


# ---------------------------------------------------------------- which optimizer

def test_an_optimizer_made_later_decides_and_so_does_the_next(model: Any) -> None:
    """From a loop to updates on arrival and back, with the loop's bits; each shape gets the programs it needs."""
    start, found = weights(model), []
    for overlaps in ((None, None, None), (None, "backward", None)):
        model.load_state_dict(start)
        for seed, overlap in enumerate(overlaps):
            optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, overlap=overlap)
            loss = model(**batch(seed)).loss
            assert ("update" in model.megacompile.program(batch(seed)).sections) == (overlap is None)
            loss.backward()
            assert all((p.grad is None) == (overlap is not None) for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights(model))
    assert same_bits(*found)


def test_an_optimizer_made_between_forward_and_backward_updates_at_its_step(model: Any) -> None:
    """The forward's program stores gradients: they are not lost."""
    start, found = weights(model), []
    for overlap in (None, "backward"):
        model.load_state_dict(start)
        model.zero_grad()
        loss = model(**batch(0)).loss
        optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, overlap=overlap)
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        found.append(weights(model))
    assert same_bits(*found)


def test_a_loss_of_an_optimizer_that_is_gone_is_refused(model: Any) -> None:
    optimizer = megacompile.AdamW(model.parameters(), overlap="backward")
    loss = model(**batch(0)).loss
    del optimizer
    gc.collect()
    with pytest.raises(LeaseError, match="with update='arrival', no longer exists: run the forward again"):
        loss.backward()
    model(**batch(0)).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_another_optimizer_s_step_is_refused_since_it_would_find_no_gradient(model: Any) -> None:
    first, *others = model.parameters()
    other = megacompile.AdamW([first], lr=1e-2)
    optimizer = megacompile.AdamW(others, lr=1e-2, overlap="backward")
    loss = model(**batch(0)).loss
    with pytest.raises(MegacompileError, match="another optimizer, made later with update='arrival'"):
        other.step()
    with pytest.raises(MegacompileError, match=r"the gradient of model.embed_tokens.weight would be lost"):
        loss.backward()
    optimizer.add_param_group({"params": [first]})
    model(**batch(0)).loss.backward()
    optimizer.step()
    with pytest.raises(MegacompileError, match=r"another optimizer, made later, updates model.embed_tokens.weight now"):
        other.step()


# ---------------------------------------------------------------- refusals, after which the loop goes on

def test_a_second_backward_before_the_step_is_refused(model: Any, optimizer: Any) -> None:
    model(**batch(0)).loss.backward()
    after = weights(model)
    loss = model(**batch(1)).loss
    with pytest.raises(LeaseError, match=r"a second backward before step\(\) .*: call optimizer.step\(\) first"):
        loss.backward()
    assert same_bits(weights(model), after)
    optimizer.step()
    with pytest.raises(LeaseError, match="was already used by a backward"):
        loss.backward()
    step(model, optimizer, 1)
    assert not same_bits(weights(model), after)


def test_a_backward_beside_another_open_forward_is_refused(model: Any, optimizer: Any) -> None:
    start = weights(model)
    one, other = model(**batch(0)).loss, model(**batch(1)).loss
    with pytest.raises(LeaseError, match="another forward waits for its backward"):
        (one + other).backward()
    assert same_bits(weights(model), start) and all(state["step"] == 0 for state in optimizer.state.values())
    step(model, optimizer)  # both were given up


def test_a_loss_dropped_without_a_backward_does_not_block_later_steps(model: Any, optimizer: Any) -> None:
    for seed in range(3):
        loss = model(**batch(seed)).loss
        if seed != 1:  # a loop that leaves out some batches
            loss.backward()
            optimizer.step()
    assert all(state["step"] == 2 for state in optimizer.state.values())


def test_gradients_that_wait_for_a_step_are_not_lost(model: Any) -> None:
    model(**batch(0)).loss.backward()
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, overlap="backward")
    loss = model(**batch(1)).loss
    with pytest.raises(MegacompileError, match=r"gradients of an earlier backward wait for a step: call step\(\) or zero_grad"):
        loss.backward()
    optimizer.step()  # an ordinary one
    optimizer.zero_grad()
    assert all(state["step"] == 1 for state in optimizer.state.values())
    step(model, optimizer, 2)


def test_gradients_set_by_hand_are_refused(model: Any, optimizer: Any) -> None:
    step(model, optimizer)
    model.lm_head.weight.grad = torch.zeros_like(model.lm_head.weight)
    with pytest.raises(MegacompileError, match=r"set by hand, but the last training step stored none .*zero_grad\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    step(model, optimizer, 1)


def test_a_parameter_without_a_group_is_refused_since_its_gradient_would_be_lost(model: Any) -> None:
    _, *others = model.parameters()
    optimizer = megacompile.AdamW(others, lr=1e-2, overlap="backward")
    start = weights(model)
    loss = model(**batch(0)).loss
    with pytest.raises(MegacompileError, match=r"the gradient of model.embed_tokens.weight would be lost"):
        loss.backward()
    assert same_bits(weights(model), start)
    optimizer.add_param_group({"params": [model.model.embed_tokens.weight], "weight_decay": 0.0})
    step(model, optimizer)
    assert not same_bits(weights(model), start)


# ---------------------------------------------------------------- failures

def fail_at(model: Any, number: int) -> None:
    """The backward fails at its how-manieth update."""
    seen = []

    def probe(node: Any) -> None:
        if op_of(node).name == "update":
            seen.append(node)
            if len(seen) == number:
                engine.probe(model, None)
                raise RuntimeError("power cut")

    engine.probe(model, probe)


def failing(model: Any) -> None:
    """A backward that fails, then or at the next call."""
    def act() -> None:
        model(**batch(0)).loss.backward()
        model.megacompile.synchronize()

    with pytest.raises(LaneError, match="power cut"):
        act()


@pytest.mark.parametrize("use", [
    lambda m, o: m(**batch(1)), lambda m, o: o.step(), lambda m, o: m.state_dict(), lambda m, o: o.state_dict()],
    ids=["forward", "step", "state_dict", "optimizer state"])
def test_a_backward_that_stops_between_two_updates_is_torn_for_good(model: Any, optimizer: Any, use: Any) -> None:
    """The gradients of the missing tiles are gone: only a checkpoint helps."""
    start = weights(model)
    fail_at(model, 3)
    failing(model)
    for _ in range(2):
        with pytest.raises(TornError, match="an update stopped half-way: load a checkpoint"):
            use(model, optimizer)
    model.load_state_dict(start)
    step(model, optimizer)


def test_a_backward_that_fails_before_its_first_update_changes_nothing_and_counts_no_step(model: Any) -> None:
    start, found = weights(model), []
    for fault in (False, True):
        model.load_state_dict(start)
        optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, overlap="backward")
        if fault:
            fail_at(model, 1)
            failing(model)
            assert same_bits(weights(model), start) and all(p.grad is None for p in model.parameters())
            optimizer.step()  # nothing
        for seed in range(2):
            step(model, optimizer, seed)
        found.append(weights(model))
        assert all(state["step"] == 2 for state in optimizer.state.values())
    assert same_bits(*found)


def test_a_checkpoint_loaded_before_the_step_begins_anew(model: Any) -> None:
    saved, found = weights(model), []
    for disturbed in (False, True):
        model.load_state_dict(saved)
        optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, overlap="backward")
        if disturbed:
            model(**batch(0)).loss.backward()
            model.load_state_dict(saved)
            optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, overlap="backward")
        step(model, optimizer, 1)
        found.append(weights(model))
    assert same_bits(*found) and not same_bits(found[0], saved)


def test_the_former_name_of_updates_on_arrival_means_the_same(model: Any) -> None:
    former = megacompile.AdamW(model.parameters(), overlap="backward")
    assert former.on_arrival and not megacompile.AdamW(model.parameters()).on_arrival
    assert megacompile.AdamW(model.parameters(), update="arrival").on_arrival
    with pytest.raises(MegacompileError, match="update='later' is out of range: give update='step'"):
        megacompile.AdamW(model.parameters(), update="later")
