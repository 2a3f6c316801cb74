"""Gradients that are not finite change nothing: neither weights nor moments nor step counts."""
from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine
import pytest
import tiny_models
import torch
from safetensors.torch import load_file
from tiny_models import batch, same_bits, state_of, train_step, weights

import megacompile
from megacompile.errors import MegacompileError, NonFiniteError
from megacompile.ir.program import Lane
from megacompile.runtime.operations import OPERATIONS
from megacompile.runtime.reference import ReferenceExecutor

#: Tiles updated on the host, on the device, and visiting it, and slabs between; bfloat16, so that there are remainders too.
mixed = tiny_models.shared_in_module(bf16=True, micro_batch_size=2, pinned_memory="32KiB", resident_state=("model.layers.0",),
                                     visiting_state=("prologue", "model.layers.1"))


@pytest.fixture
def mixed_model(mixed: tiny_models.Shared) -> Any:
    return mixed.fresh()


def bad_step(model: Any, optimizer: Any, seed: int = 7) -> None:
    """A step whose loss is not a number."""
    (model(**batch(seed)).loss * float("nan")).backward()
    optimizer.step()
    optimizer.zero_grad()


def finish(model: Any, step: Callable[[], object]) -> None:
    """A step, and the update that may still be on its way when it returns."""
    step()
    model.megacompile.synchronize()


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_skipped_step_leaves_everything_as_if_its_batch_had_never_been(
        mixed_model: Any, mixed: tiny_models.Shared, clip: float | None) -> None:
    def run(bad: bool) -> dict[str, torch.Tensor]:
        model = mixed.fresh()
        optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, max_grad_norm=clip, non_finite="skip")
        train_step(model, optimizer, 0)
        if bad:
            before = state_of(model, optimizer)
            for _ in range(2):
                bad_step(model, optimizer)
                assert not torch.tensor(optimizer.grad_norm).isfinite()
            assert same_bits(state_of(model, optimizer), before)
        train_step(model, optimizer, 1)
        return state_of(model, optimizer)

    skipped = mixed_model.megacompile.stats["skipped_steps"]
    assert same_bits(run(bad=True), run(bad=False))
    assert mixed_model.megacompile.stats["skipped_steps"] == skipped + 2


def poison(model: Any, op: str = "loss") -> None:
    """The next gradient that this op makes is infinite somewhere, once."""
    executor = engine.executor(model)
    plain = OPERATIONS[op]

    def poisoned(frame: Any, node: Any) -> Any:
        OPERATIONS[op] = plain
        result = plain(frame, node)
        result.outputs[0].view(-1)[0] = float("inf")
        return result

    OPERATIONS[op] = poisoned
    executor.idle()


def test_whole_steps_that_are_numbered_before_the_one_before_is_skipped_have_the_right_number(
        mixed_model: Any, mixed: tiny_models.Shared) -> None:
    """A whole step is asked for while the clip of the one before is still on its way."""
    def run(bad: bool) -> dict[str, torch.Tensor]:
        model = mixed.fresh()
        optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5, non_finite="skip")
        handle = model.megacompile
        handle.train_step(batch(0), optimizer)
        if bad:
            handle.synchronize()
            engine.delay(model, lambda lane: time.sleep(0.01) if lane == Lane.CPU else None)
            poison(model)
            handle.train_step(batch(7), optimizer)
        handle.train_step(batch(1), optimizer)
        handle.train_step(batch(2), optimizer)
        return state_of(model, optimizer)

    assert same_bits(run(bad=True), run(bad=False))


@pytest.mark.parametrize("whole", [False, True], ids=["loop", "train_step"])
def test_an_error_names_the_step_the_loss_and_the_tiles_and_training_can_go_on(
        mixed_model: Any, mixed: tiny_models.Shared, whole: bool) -> None:
    def step(model: Any, optimizer: Any, seed: int) -> None:
        if whole:
            model.megacompile.train_step(batch(seed), optimizer)
        else:
            train_step(model, optimizer, seed)

    def run(bad: bool) -> dict[str, torch.Tensor]:
        model = mixed.fresh()
        optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
        step(model, optimizer, 0)
        if bad:
            model.megacompile.synchronize()
            before = state_of(model, optimizer)
            poison(model, "recompute_backward")  # in the middle of the stack: the tiles above it are finite
            said = r"the gradients of step 2 are not finite \(loss 4.*nothing was updated"
            with pytest.raises(NonFiniteError, match=said) as caught:
                finish(model, lambda: step(model, optimizer, 7))
            error = caught.value
            assert error.step == 2 and 3 < error.loss < 6 and not torch.tensor(error.norm).isfinite()
            assert "model.layers.0" in error.tiles and len(error.tiles) < len(engine.tiles(model))
            assert same_bits(state_of(model, optimizer), before)
            optimizer.zero_grad()
        step(model, optimizer, 1)
        return state_of(model, optimizer)

    assert same_bits(run(bad=True), run(bad=False))


def test_gradients_that_are_not_finite_are_refused_again_and_cannot_be_completed(model: Any) -> None:
    optimizer = megacompile.AdamW(model.parameters())
    (model(**batch(0)).loss * float("inf")).backward()
    for _ in range(2):
        optimizer.step()
        with pytest.raises(NonFiniteError, match="step 1 "):
            model.megacompile.synchronize()
    assert all(state["step"] == 0 for state in optimizer.state.values())


def test_a_gradient_that_the_user_spoils_is_seen(model: Any) -> None:
    optimizer = megacompile.AdamW(model.parameters())
    model(**batch(0)).loss.backward()
    model.lm_head.weight.grad[3, 2] = float("nan")
    optimizer.step()
    with pytest.raises(NonFiniteError) as caught:
        model.megacompile.synchronize()
    assert len(caught.value.tiles) == 1


def test_a_dump_holds_the_batch_and_the_norm_of_each_gradient(model: Any, tmp_path: Path) -> None:
    optimizer = megacompile.AdamW(model.parameters(), non_finite="dump", dump_folder=tmp_path)
    model(**batch(3)).loss.backward()  # two batches before one step
    bad_step(model, optimizer, 4)
    with pytest.raises(NonFiniteError, match=f"dumped: {tmp_path}") as caught:
        model.megacompile.synchronize()
    assert caught.value.folder == tmp_path / "step-1"
    report = json.loads((tmp_path / "step-1/report.json").read_text())
    assert report["step"] == 1 and report["norm"] == "nan" and 3 < report["loss"] < 10
    names = [name for tile in report["tiles"].values() for name in tile["parameters"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    for number, seed in enumerate((3, 4)):
        found = load_file(tmp_path / f"step-1/batch-{number}.safetensors")
        micro_batches = [found[f"input_ids.{i}"] for i in range(2)]
        assert torch.equal(torch.cat(micro_batches), batch(seed)["input_ids"])


def test_a_dump_that_cannot_be_written_is_said_and_the_error_is_the_same(model: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    optimizer = megacompile.AdamW(model.parameters(), non_finite="dump", dump_folder=tmp_path / "file")
    bad_step(model, optimizer)
    with pytest.raises(NonFiniteError, match="not dumped"):
        model.megacompile.synchronize()


def test_updates_on_arrival_of_a_loss_that_is_not_a_number_change_nothing(model: Any) -> None:
    """The first tile to arrive is spoilt."""
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, overlap="backward")
    before = state_of(model, optimizer)
    with pytest.raises(NonFiniteError, match="nothing was updated: leave the batch out"):
        finish(model, lambda: bad_step(model, optimizer))
    assert same_bits(weights(model), {name: before[name] for name in weights(model)})
    train_step(model, optimizer)
    assert {int(state["step"]) for state in optimizer.state_dict()["state"].values()} == {1}


def one_step(model: Any, optimizer: Any, whole: bool, seed: int = 0) -> None:
    """With its update done."""
    model.megacompile.train_step(batch(seed), optimizer) if whole else train_step(model, optimizer, seed)
    model.megacompile.synchronize()


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("whole", [False, True], ids=["loop", "train_step"])
def test_on_arrival_a_tile_whose_gradients_are_not_finite_keeps_weights_and_moments(
        mixed: tiny_models.Shared, whole: bool, policy: str) -> None:
    """Poisoned in the middle of the stack: the epilogue above is updated, on the host; tiles below are not, neither there nor
    on the device. Training goes on."""
    model = mixed.fresh()
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, overlap="backward", non_finite=policy)
    one_step(model, optimizer, whole)
    before, kept = state_of(model, optimizer), model.megacompile.stats["kept_tiles"]
    poison(model, "loss")
    if policy == "skip":
        one_step(model, optimizer, whole, seed=1)
    else:
        with pytest.raises(NonFiniteError, match=r"3 of 5 tiles kept weights and moments; the others were updated") as caught:
            one_step(model, optimizer, whole, seed=1)
        assert set(caught.value.tiles) == {"prologue", "model.layers.1", "model.layers.2"}
    model.megacompile.synchronize()  # the device is asked, too
    assert model.megacompile.stats["kept_tiles"] == kept + 4
    after = state_of(model, optimizer)
    changed = {name for name in weights(model) if not torch.equal(after[name], before[name])}
    assert changed == {"lm_head.weight", "model.norm.weight"}
    index = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    for name, parameter in model.named_parameters():
        moments = [f"{index[id(parameter)]}.{key}" for key in ("exp_avg", "exp_avg_sq", "remainder")]
        assert all(torch.equal(after[key], before[key]) for key in moments) == (name not in changed)
    one_step(model, optimizer, whole, seed=2)
    assert all(not torch.equal(now, after[name]) for name, now in weights(model).items() if "weight" in name)


def test_on_arrival_the_host_learns_at_its_next_wait_which_device_tiles_were_kept(
        mixed: tiny_models.Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(frame: Any, node: Any) -> Any:
        gradients = reduce(frame, node)
        if node.kwargs["tile"] == "model.layers.0":
            gradients.norms[0] = float("inf")
        return gradients

    model, reduce = mixed.fresh(), OPERATIONS["reduce"]
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, overlap="backward")
    one_step(model, optimizer, whole=True)
    before = weights(model)
    monkeypatch.setitem(OPERATIONS, "reduce", spoilt)
    with pytest.raises(NonFiniteError, match="1 of 5 tiles kept weights and moments") as caught:
        one_step(model, optimizer, whole=True, seed=1)
    assert caught.value.tiles == ("model.layers.0",)
    same = {name for name, weight in weights(model).items() if torch.equal(weight, before[name])}
    assert same == {name for name in before if name.startswith("model.layers.0.")}
    monkeypatch.setitem(OPERATIONS, "reduce", reduce)
    one_step(model, optimizer, whole=True, seed=2)


def test_on_arrival_a_step_that_updates_nothing_is_not_counted(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the next step is numbered before that is known."""
    def spoilt(frame: Any, node: Any) -> Any:
        gradients = reduce(frame, node)
        gradients.norms.fill_(float("nan"))
        return gradients

    def run(*bad: bool) -> dict[str, torch.Tensor]:
        model.load_state_dict(start)
        optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, overlap="backward", non_finite="skip")
        for seed, spoil in enumerate(bad):
            monkeypatch.setitem(OPERATIONS, "reduce", spoilt if spoil else reduce)
            model.megacompile.train_step(batch(7 if spoil else sum(not each for each in bad[:seed])), optimizer)
        model.megacompile.synchronize()
        return state_of(model, optimizer)

    start, reduce, executor = weights(model), OPERATIONS["reduce"], engine.executor(model)
    monkeypatch.setattr(executor, "delay", lambda lane: time.sleep(0.01) if lane == Lane.CPU else None)
    assert same_bits(run(False, True, False, False), run(False, False, False))


def test_what_cannot_be_promised_is_refused(model: Any) -> None:
    with pytest.raises(MegacompileError, match="non_finite='sometimes' must be one of 'raise', 'skip', 'dump'"):
        megacompile.AdamW(model.parameters(), non_finite="sometimes")


def test_the_reference_interpreter_refuses_them_as_well(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.runner(model), "executor", ReferenceExecutor(engine.backend(model)))
    with pytest.raises(NonFiniteError, match="the gradients of step 1 are not finite"):
        bad_step(model, megacompile.AdamW(model.parameters()))
