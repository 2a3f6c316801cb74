"""`train_step`: a whole step as one program trains as the plain loop does, in waves and with updates on arrival."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import engine
import pytest
import tiny_models
import torch
from tiny_models import batch

import megacompile
from megacompile.errors import LaneError, MegacompileError, TornError, UnsupportedError
from megacompile.ir.program import argument, find, op_of
from megacompile.planning.planner import Choice, Planner

STEPS = 3


def weights(whole: bool, clip: float | None = 1.0, overlap: str | None = None, bf16: bool = False,
            **options: Any) -> dict[str, torch.Tensor]:
    """Weights after some steps on batches of 6 sequences."""
    model = megacompile.stream(tiny_models.build(bf16), device="cpu", micro_batch_size=2, **options)
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, eps=1e-4, max_grad_norm=clip, overlap=overlap)
    for seed in range(STEPS):
        if whole:
            model.megacompile.train_step(batch(seed, rows=6), optimizer)
        else:
            model(**batch(seed, rows=6)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    found = {name: value.clone() for name, value in model.state_dict().items()}
    model.megacompile.close()
    return found


@pytest.fixture(scope="module")
def loop() -> Callable[..., dict[str, torch.Tensor]]:
    """The plain loop's weights, by clipping and dtype."""
    found: dict[tuple[Any, ...], dict[str, torch.Tensor]] = {}

    def get(clip: float | None, bf16: bool) -> dict[str, torch.Tensor]:
        if (clip, bf16) not in found:
            found[clip, bf16] = weights(False, clip, bf16=bf16)
        return found[clip, bf16]

    return get


@pytest.mark.sample(5)
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("options", [
    {}, {"waves": 3}, {"waves": 2, "saved_layers": 3}, {"waves": 2, "checkpoint_interval": 2, "pinned_memory": "32KiB"},
    {"waves": 3, "resident": "all"}, {"reference": True, "waves": 3}, {"waves": 2, "resident_state": "all"},
    {"resident_state": ("prologue", "model.layers.1"), "saved_layers": 1}, {"waves": 3, "host_checkpoints": True},
    {"waves": 2, "host_checkpoints": True, "checkpoint_interval": 2}], ids=str)
def test_a_whole_step_gives_the_bits_of_the_plain_loop(options: dict[str, Any], bf16: bool, loop: Any) -> None:
    """The models' head is not tied, so that waves add to each accumulator in the order of the plain loop."""
    ours, theirs = weights(True, bf16=bf16, **options), loop(1.0, bf16)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.sample(3)
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("options", [{}, {"waves": 3, "resident": "all"}, {"waves": 2, "pinned_memory": "32KiB"},
                                     {"waves": 2, "resident_state": ("prologue", "model.layers.1")}], ids=str)
def test_updates_on_arrival_give_the_bits_of_an_unclipped_loop(options: dict[str, Any], bf16: bool, loop: Any) -> None:
    ours, theirs = weights(True, None, "backward", bf16, **options), loop(None, bf16)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("options", [{}, {"waves": 3, "resident": ("model.layers.1",)},
                                     {"pinned_memory": "32KiB", "resident": "all"}], ids=str)
def test_the_order_of_updates_on_arrival_changes_no_bit(options: dict[str, Any], loop: Any, monkeypatch: pytest.MonkeyPatch
                                                        ) -> None:
    choose = Planner.choose

    def lowest_first(planner: Planner, *arguments: Any, **keywords: Any) -> Choice:
        choice = choose(planner, *arguments, **keywords)
        tiles = tuple(planner.tiling.layouts)
        order = (*tiles[1:3], tiles[0], *tiles[3:]) if choice.plan.update == "arrival" else ()
        return replace(choice, plan=replace(choice.plan, update_order=order))

    monkeypatch.setattr(Planner, "choose", lowest_first)
    ours, theirs = weights(True, None, "backward", **options), loop(None, False)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_waves_divide_what_is_alive(make_schedule: Callable[..., Any]) -> None:
    """Forward and backward alternate by wave, and every tile goes home once, after the last."""
    program = make_schedule(micro_batches=(1, 1, 1, 1), waves=2, whole_step=True).program
    section = program.section("train_step")
    order = [argument(n, "mb") for n in find(section, "loss", "recompute_backward")]
    half = len(order) // 2
    assert set(order[:half]) == {0, 1} and set(order[half:]) == {2, 3}
    listed = [n for n in section.nodes if op_of(n).name in ("loss", "offload")]
    assert [op_of(n).name for n in listed[:4]] == ["loss"] * 4
    assert len(listed) == 4 + len(program.tiles)


def test_a_whole_step_leaves_no_gradient_and_no_graph(model: Any) -> None:
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    loss = model.megacompile.train_step(batch(0), optimizer)
    assert not loss.requires_grad and all(p.grad is None for p in model.parameters())
    assert optimizer.grad_norm > 0
    model(**batch(1)).loss.backward()  # the plain loop goes on from there
    optimizer.step()


def test_what_a_whole_step_cannot_do_is_refused(model: Any) -> None:
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(UnsupportedError, match="train_step needs labels"):
        model.megacompile.train_step({"input_ids": batch(0)["input_ids"]}, optimizer)
    model(**batch(0)).loss.backward()
    with pytest.raises(MegacompileError, match="gradients of an earlier backward wait"):
        model.megacompile.train_step(batch(0), optimizer)
    optimizer.zero_grad()
    with pytest.raises(MegacompileError, match="leave max_grad_norm out"):
        megacompile.AdamW(model.parameters(), max_grad_norm=1.0, overlap="backward")
    with pytest.raises(MegacompileError, match="overlap='sometimes'"):
        megacompile.AdamW(model.parameters(), overlap="sometimes")


@pytest.mark.parametrize(("overlap", "whole"), [("backward", True), (None, True), (None, False)])
def test_a_step_that_never_begins_is_not_counted(overlap: str | None, whole: bool, model: Any,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam's bias correction would be that of a step too many."""
    optimizer, streamed = megacompile.AdamW(model.parameters(), overlap=overlap), engine.of(model)

    def step() -> None:
        if whole:
            model.megacompile.train_step(batch(0), optimizer)
        else:
            optimizer.step()

    if not whole:
        model(**batch(0)).loss.backward()
    with monkeypatch.context() as refusing:
        refusing.setattr(streamed, "_enter", None if whole else streamed._enter)
        refusing.setattr(streamed, "_reserve", None)
        with pytest.raises(TypeError):
            step()
    step()
    model.megacompile.synchronize()
    assert {state["step"] for state in optimizer.state_dict()["state"].values()} == {1}


def test_an_update_on_arrival_that_stops_half_way_is_torn_for_good(model: Any) -> None:
    """Gradients of the missing tiles were consumed or never stored: only a checkpoint helps."""
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, overlap="backward")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen = []

    def probe(node: Any) -> None:
        if op_of(node).name == "update":
            seen.append(node)
            if len(seen) == 3:
                raise RuntimeError("power cut")

    engine.probe(model, probe)
    def step() -> None:
        model.megacompile.train_step(batch(0), optimizer)
        model.megacompile.synchronize()  # the update may still be on its way when the step returns

    with pytest.raises(LaneError, match="power cut"):
        step()
    engine.probe(model, None)
    for attempt in (lambda: model(**batch(0)), optimizer.step, lambda: model.megacompile.train_step(batch(0), optimizer)):
        with pytest.raises(TornError, match="load a checkpoint"):
            attempt()
    model.load_state_dict(before)
    model.megacompile.train_step(batch(0), optimizer)
