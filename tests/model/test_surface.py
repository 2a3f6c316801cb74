"""The user's loop: what works with a plain PyTorch model works with a streamed one, with the same numbers."""
from __future__ import annotations

import copy
import gc
import io
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import engine
import pytest
import tiny_models
import torch
from tiny_models import assert_same_gradients, assert_same_weights, batch, same_bits, train_step, weights
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

import megacompile
from megacompile.errors import InsufficientMemoryError, UnsupportedError
from megacompile.ir.program import Lane
from megacompile.weights.empty_models import move_rest
from megacompile.weights.tiling import Tiling

# ---------------------------------------------------------------- forwards and backwards in any order

def test_two_forwards_before_a_backward_give_each_its_own_gradients(model: Any, native: Any) -> None:
    first, second = model(**batch(1)).loss, model(**batch(2, rows=2, length=5)).loss
    second.backward()
    native(**batch(2, rows=2, length=5)).loss.backward()
    assert_same_gradients(model, native)
    first.backward()
    native(**batch(1)).loss.backward()
    assert_same_gradients(model, native)


def test_backwards_before_a_step_accumulate(model: Any, native: Any) -> None:
    for each in (model, native):
        for seed in range(3):
            (each(**batch(seed)).loss / 3).backward()
    assert_same_gradients(model, native)


@pytest.mark.parametrize("labels", [True, False])
def test_an_evaluation_between_forward_and_backward_changes_nothing(model: Any, native: Any, labels: bool) -> None:
    loss = model(**batch(1)).loss
    with torch.no_grad():
        model(**{k: v for k, v in batch(2, rows=4, length=7).items() if labels or k != "labels"})
    loss.backward()
    native(**batch(1)).loss.backward()
    assert_same_gradients(model, native)


def test_batches_of_alternating_shapes_train_as_native(model: Any, native: Any) -> None:
    # A key's bias has no gradient but rounding, of which a small eps would make steps.
    ours = megacompile.AdamW(model.parameters(), lr=1e-2, eps=1e-5, max_grad_norm=1.0)
    theirs = torch.optim.AdamW(native.parameters(), lr=1e-2, eps=1e-5)
    for seed in range(6):
        shape = {"rows": 3, "length": 9} if seed % 2 else {"rows": 2, "length": 5}
        loss = model(**batch(seed, **shape)).loss
        true = native(**batch(seed, **shape)).loss
        assert abs(loss - true) <= 1e-5 * true
        loss.backward()
        true.backward()
        norm = torch.nn.utils.clip_grad_norm_(native.parameters(), 1.0)
        ours.step()
        theirs.step()
        assert ours.grad_norm == pytest.approx(norm.item(), rel=1e-4)
        ours.zero_grad()
        theirs.zero_grad()
    assert_same_weights(model, native)


def test_a_loss_can_be_combined_with_other_torch_ops(model: Any, native: Any) -> None:
    extra = [torch.ones(3, requires_grad=True) for _ in range(2)]
    for each, x in zip((model, native), extra, strict=True):
        (each(**batch(1)).loss * (x * torch.arange(3.0)).sum() + x.square().sum()).backward()
    assert torch.allclose(extra[0].grad, extra[1].grad, rtol=1e-5)
    assert_same_gradients(model, native)


def test_a_gradient_that_is_not_finite_is_passed_on(model: Any) -> None:
    (model(**batch(1)).loss * float("nan")).backward()
    assert all(p.grad.isnan().any() for p in model.parameters())


# ---------------------------------------------------------------- gradients that the user touches

@pytest.mark.parametrize("who", ["optimizer", "model"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_starts_anew(model: Any, native: Any, who: str, set_to_none: bool) -> None:
    for each in (model, native):
        optimizer = (megacompile.AdamW if each is model else torch.optim.AdamW)(each.parameters(), lr=1e-2)
        for seed in range(2):
            each(**batch(seed)).loss.backward()
            optimizer.step()
            (optimizer if who == "optimizer" else each).zero_grad(set_to_none=set_to_none)
            assert all((p.grad is None) == set_to_none and (set_to_none or not p.grad.any()) for p in each.parameters())
        each(**batch(2)).loss.backward()
    assert_same_gradients(model, native)
    assert_same_weights(model, native)


def test_a_gradient_set_to_none_is_overwritten_while_others_accumulate(model: Any, native: Any) -> None:
    for each in (model, native):
        each(**batch(1)).loss.backward()
        each.model.layers[1].mlp.up_proj.weight.grad = None
        each(**batch(2)).loss.backward()
    assert_same_gradients(model, native)


def test_a_parameter_without_gradient_is_left_alone_by_the_step(model: Any, native: Any) -> None:
    for each in (model, native):
        optimizer = (megacompile.AdamW if each is model else torch.optim.AdamW)(each.parameters(), lr=1e-2)
        each(**batch(1)).loss.backward()
        each.model.layers[1].mlp.up_proj.weight.grad = None
        optimizer.step()
    start = tiny_models.build().model.layers[1].mlp.up_proj.weight
    assert torch.equal(model.state_dict()["model.layers.1.mlp.up_proj.weight"], start)
    assert_same_weights(model, native)


def test_gradients_clipped_by_torch_are_what_the_step_uses(model: Any, native: Any) -> None:
    for each in (model, native):
        optimizer = (megacompile.AdamW if each is model else torch.optim.AdamW)(each.parameters(), lr=1e-2, eps=1e-2)
        each(**batch(1)).loss.backward()
        torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1)
        optimizer.step()
        if each is model:
            assert optimizer.grad_norm == pytest.approx(0.1, rel=1e-4)
    assert_same_weights(model, native)


@pytest.mark.parametrize("change", ["in place", "replaced"])
def test_a_changed_gradient_counts_in_the_clipping_norm(model: Any, change: str) -> None:
    optimizer = megacompile.AdamW(model.parameters(), max_grad_norm=1.0)
    model(**batch(1)).loss.backward()
    for parameter in model.parameters():
        if change == "in place":
            parameter.grad.mul_(3.0)
        else:
            parameter.grad = parameter.grad * 3.0
    expected = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(expected.item(), rel=1e-5)


# ---------------------------------------------------------------- writes from outside

def test_another_optimizer_trains_the_same(model: Any, native: Any) -> None:
    for each in (model, native):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
        for seed in range(3):
            train_step(each, optimizer, seed)
    assert_same_weights(model, native)


def test_loaded_weights_are_used(model: Any, native: Any) -> None:
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-1)
    start = {k: v.clone() for k, v in model.state_dict().items()}
    before = train_step(model, optimizer, seed=3)
    assert train_step(model, optimizer, seed=3) < before - 0.01
    model.load_state_dict(start)
    assert float(model(**batch(3)).loss.detach()) == before


def test_a_write_through_no_grad_is_used_and_clears_the_remainder(bf16_model: Any) -> None:
    model = bf16_model
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
    train_step(model, optimizer)
    parameter = model.lm_head.weight
    model.megacompile.synchronize()
    assert not torch.equal(optimizer.master(parameter), parameter.float())
    with torch.no_grad():
        before = model(**batch(1)).loss
        parameter.mul_(-50.0)
        after = model(**batch(1)).loss
    assert torch.equal(optimizer.master(parameter), parameter.float())
    plain = copy.deepcopy(model)
    with torch.no_grad():
        assert after.item() == pytest.approx(plain(**batch(1)).loss.item(), rel=2e-2)
    assert abs(after - before) > 0.1  # a stale resident copy would give the loss of before


def test_another_optimizer_in_bf16_is_warned_of_once() -> None:
    model = megacompile.stream(tiny_models.build(bf16=True), device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_step(model, optimizer)
    with pytest.warns(UserWarning, match=r"use megacompile\.AdamW, which keeps an FP32 master"):
        train_step(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_step(model, optimizer)
        train_step(model, optimizer)
    model.megacompile.close()


# ---------------------------------------------------------------- the optimizer

def test_learning_rate_schedulers_drive_the_optimizer(model: Any, native: Any) -> None:
    for each in (model, native):
        optimizer = (megacompile.AdamW if each is model else torch.optim.AdamW)(each.parameters(), lr=1e-2, eps=1e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-2, total_steps=5)
        for seed in range(4):
            train_step(each, optimizer, seed)
            schedule.step()
    assert_same_weights(model, native)


def test_parameter_groups_may_divide_a_tile(model: Any, native: Any) -> None:
    for each in (model, native):
        matrices = [p for p in each.parameters() if p.dim() > 1]
        vectors = [p for p in each.parameters() if p.dim() == 1]
        optimizer = (megacompile.AdamW if each is model else torch.optim.AdamW)(
            [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-2}], lr=1e-2)
        for seed in range(3):
            train_step(each, optimizer, seed)
    assert_same_weights(model, native)


def test_a_closure_is_called_with_gradients_enabled(model: Any) -> None:
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(**batch(1)).loss
        loss.backward()
        return loss.detach()

    first, second = optimizer.step(closure), optimizer.step(closure)
    assert second < first


def test_training_resumes_bit_for_bit_from_saved_state(bf16_model: Any) -> None:
    model = bf16_model
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    for seed in range(3):
        train_step(model, optimizer, seed)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    masters = [optimizer.master(p) for p in model.parameters()]
    assert any(not torch.equal(m, p.float()) for m, p in zip(masters, model.parameters(), strict=True))
    for seed in range(3, 5):
        train_step(model, optimizer, seed)
    undisturbed = weights(model)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model.load_state_dict(saved["model"])
    again = megacompile.AdamW(model.parameters(), lr=1.0, max_grad_norm=1.0)
    again.load_state_dict(saved["optimizer"])
    assert again.param_groups[0]["lr"] == 1e-2
    for parameter, master in zip(model.parameters(), masters, strict=True):
        assert torch.equal(again.master(parameter), master)
    for seed in range(3, 5):
        train_step(model, again, seed)
    assert same_bits(weights(model), undisturbed)


def test_a_master_set_from_outside_is_kept_exactly(bf16_model: Any) -> None:
    optimizer = megacompile.AdamW(bf16_model.parameters())
    parameter = bf16_model.lm_head.weight
    master = torch.randn(parameter.shape)
    optimizer.set_master(parameter, master)
    assert torch.equal(optimizer.master(parameter), master)
    with torch.no_grad():
        expected = copy.deepcopy(bf16_model)(**batch(1)).loss.item()
        assert bf16_model(**batch(1)).loss.item() == pytest.approx(expected, rel=2e-2)


# ---------------------------------------------------------------- reads while an update is in flight

def late_updates(model: Any, seconds: float = 0.03) -> None:
    engine.delay(model, lambda lane: time.sleep(seconds) if lane == Lane.CPU else None)


@pytest.fixture
def released(model: Any) -> Iterator[threading.Event]:
    """While it is not set no update begins. Each of its instructions is late."""
    event = threading.Event()
    event.set()

    def delay(lane: Lane) -> None:
        if lane == Lane.CPU:
            assert event.wait(30), "somebody waits for an update that has not begun"
            time.sleep(0.03)

    engine.delay(model, delay)
    yield event
    event.set()


def _saved_to_directory(model: Any, directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def _saved_to_file(model: Any, directory: Path) -> dict[str, torch.Tensor]:
    torch.save(model.state_dict(), directory / "weights.pt")
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert (directory / "weights.pt").stat().st_size < size + 64 * 1024, "more than the weights was written"
    return torch.load(directory / "weights.pt", weights_only=True)


READS: dict[str, Any] = {
    "state_dict": lambda model, directory: weights(model),
    "parameters": lambda model, directory: {n: p.detach().clone() for n, p in model.named_parameters()},
    "parameters of a module around it": lambda model, directory: {
        name.removeprefix("0."): p.detach().clone() for name, p in nn.Sequential(model).named_parameters()},
    "deepcopy": lambda model, directory: weights(copy.deepcopy(model)),
    "save_pretrained": _saved_to_directory,
    "torch.save": _saved_to_file,
}


@pytest.mark.parametrize("read", READS)
def test_a_read_waits_for_the_update_in_flight(model: Any, read: str, tmp_path: Path, released: threading.Event,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-1)
    model(**batch(1)).loss.backward()
    before = weights(model)
    released.clear()
    optimizer.step()
    assert not engine.updating(model).done, "nothing in flight"
    idle = engine.executor(model).idle

    def begins_to_wait(*arguments: Any) -> None:
        released.set()
        idle(*arguments)

    monkeypatch.setattr(engine.executor(model), "idle", begins_to_wait)
    found = READS[read](model, tmp_path)
    model.megacompile.synchronize()
    after = weights(model)
    assert same_bits(found, after) and not same_bits(before, after)


def test_optimizer_state_waits_for_the_update_in_flight(model: Any) -> None:
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-1)
    model(**batch(1)).loss.backward()
    late_updates(model)
    optimizer.step()
    assert all(state["exp_avg"].any() for state in optimizer.state_dict()["state"].values())


def test_the_step_returns_before_the_update_is_done(model: Any, released: threading.Event) -> None:
    optimizer = megacompile.AdamW(model.parameters())
    model(**batch(1)).loss.backward()
    released.clear()
    optimizer.step()
    step = engine.step(model)
    assert step.updating.segments and not step.updating.done, "the step has waited for an update"
    released.set()
    model.megacompile.synchronize()
    assert step.updating.done == set(step.updating.segments)


# ---------------------------------------------------------------- saving, copying, generating

def test_a_saved_model_loads_with_plain_transformers_and_gives_the_same_loss(model: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
    train_step(model, optimizer)
    with torch.no_grad():
        loss = model(**batch(5)).loss
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(plain).__name__ == "Qwen2ForCausalLM" and not hasattr(plain, "megacompile")
    with torch.no_grad():
        assert plain(**batch(5)).loss.item() == pytest.approx(loss.item(), rel=1e-6)


def test_a_deep_copy_is_a_plain_model_of_its_own(model: Any, native: Any) -> None:
    plain = copy.deepcopy(model)
    assert type(plain) is type(native) and not hasattr(plain, "megacompile")
    with torch.no_grad():
        plain.lm_head.weight.zero_()
    assert model.lm_head.weight.any()


def test_greedy_generation_gives_natives_tokens(model: Any, native: Any) -> None:
    prompt = batch(4, rows=2, length=5)["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = native.eval().generate(prompt, **options)
    assert torch.equal(model.eval().generate(prompt, **options), expected)
    assert torch.equal(model.generate(prompt, attention_mask=torch.ones_like(prompt), **options), expected)


# ---------------------------------------------------------------- calls and what they return

def test_logits_are_computed_without_gradients_only(model: Any, native: Any) -> None:
    trained = model(**batch(1))
    assert trained.logits is None and trained.loss.requires_grad
    expected = native(**batch(1))
    with torch.no_grad():
        both = model(**batch(1))
    alone = model(input_ids=batch(1)["input_ids"])
    assert type(trained) is type(both) is type(alone) is type(expected)
    assert torch.allclose(both.logits, expected.logits, atol=1e-5)
    assert torch.allclose(alone.logits, expected.logits, atol=1e-5)
    assert both.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert alone.loss is None


def test_arguments_may_be_positional(model: Any) -> None:
    with torch.no_grad():
        assert torch.equal(model(batch(1)["input_ids"]).logits, model(input_ids=batch(1)["input_ids"]).logits)


@pytest.mark.nightly(held_by=(
    "tests/model/test_frozen.py::test_any_part_alone_trains_as_it_does_natively",
    "tests/model/test_frozen.py::test_what_is_frozen_has_weights_alone_in_host_memory"))
def test_frozen_parameters_stay_as_they_are_and_cost_no_gradients() -> None:
    models = []
    for _ in range(2):
        model = tiny_models.build()
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
        model.model.layers[2].mlp.up_proj.requires_grad_(False)
        models.append(model)
    model, native = models
    megacompile.stream(model, device="cpu", checkpoint_interval=2, micro_batch_size=2)
    start = weights(model)
    optimizers = [cls(m.parameters(), lr=1e-2, eps=1e-4)  # of keys' biases, whose gradients are all rounding, eps makes little
                  for cls, m in ((megacompile.AdamW, model), (torch.optim.AdamW, native))]
    for each in models:
        for seed in range(2):
            each(**batch(seed)).loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    assert_same_gradients(model, native)
    for optimizer in optimizers:
        optimizer.step()
    assert_same_weights(model, native)
    assert all(p.requires_grad or torch.equal(p, start[n]) for n, p in model.named_parameters())
    assert engine.store(model)["model.layers.0"].gradients is None
    model.megacompile.close()


def test_the_number_of_items_in_the_batch_divides_the_loss(model: Any, native: Any) -> None:
    items = torch.tensor(100)
    losses = []
    for each in (model, native):
        loss = each(**batch(1), num_items_in_batch=items).loss
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert_same_gradients(model, native)


def test_a_right_padded_batch_gives_natives_loss_and_gradients(model: Any, native: Any) -> None:
    padded = batch(1, rows=5)
    padded["attention_mask"] = torch.ones_like(padded["input_ids"])
    for row, length in enumerate((9, 5, 7, 2, 8)):
        padded["attention_mask"][row, length:] = 0
        padded["labels"][row, length:] = -100
    losses = []
    for each in (model, native):
        loss = each(**padded).loss
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert_same_gradients(model, native)


def test_eval_mode_gives_the_same_loss(model: Any) -> None:
    loss = model(**batch(1)).loss
    assert torch.equal(model.eval()(**batch(1)).loss, loss)
    model(**batch(1)).loss.backward()  # and trains, as a native model does


def test_moving_to_where_it_computes_does_nothing(model: Any) -> None:
    assert model.device == torch.device("cpu")
    assert model.to("cpu") is model.cpu() is model.to(torch.float32) is model.to("cpu", torch.float32) is model


# ---------------------------------------------------------------- several models, and the end of one

def test_two_streamed_models_train_beside_each_other(model: Any, native: Any) -> None:
    """As a policy and its reference: the loss of one mixes with the logits of the other."""
    other, plain = megacompile.stream(tiny_models.build(), device="cpu"), tiny_models.build()
    for policy, reference in ((model, other), (native, plain)):
        ours = policy is model
        optimizers = [(megacompile.AdamW if ours else torch.optim.AdamW)(m.parameters(), lr=1e-2) for m in (policy, reference)]
        for seed in range(3):
            with torch.no_grad():
                weight = reference(input_ids=batch(seed)["input_ids"]).logits.std()
            (policy(**batch(seed)).loss * weight + reference(**batch(seed)).loss).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert_same_weights(model, native)
    assert_same_weights(other, plain)
    other.megacompile.close()


def lane_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("megacompile")}


def test_a_closed_model_is_a_plain_trained_model() -> None:
    before = lane_threads()
    model, native = tiny_models.build(num_hidden_layers=1), tiny_models.build(num_hidden_layers=1)
    parameters = dict(model.named_parameters())
    megacompile.stream(model, device="cpu")
    optimizers = [megacompile.AdamW(model.parameters(), lr=1e-2), torch.optim.AdamW(native.parameters(), lr=1e-2)]
    for each, optimizer in zip((model, native), optimizers, strict=True):
        train_step(each, optimizer)
    late_updates(model)
    train_step(model, optimizers[0], 1)
    train_step(native, optimizers[1], 1)
    model.megacompile.close()
    assert lane_threads() == before
    assert type(model) is type(native) and not hasattr(model, "megacompile")
    assert all(p is parameters[n] and p.device.type == "cpu" for n, p in model.named_parameters())
    assert_same_weights(model, native)
    for use in (optimizers[0].step, optimizers[0].state_dict, lambda: optimizers[0].state):
        with pytest.raises(megacompile.MegacompileError, match="was closed, which frees the optimizer's state: call "):
            use()
    for each in (model, native):
        train_step(each, torch.optim.SGD(each.parameters(), lr=0.1), 2)
    assert_same_weights(model, native)


def test_a_model_that_is_forgotten_leaves_no_thread() -> None:
    before = lane_threads()
    model = megacompile.stream(tiny_models.build(num_hidden_layers=1), device="cpu")
    optimizer = megacompile.AdamW(model.parameters())
    train_step(model, optimizer)
    streamed = weakref.ref(engine.of(model))
    assert lane_threads() > before
    loss = model(**batch(1)).loss  # an open lease does not keep it either, once it is dropped
    del model, optimizer, loss
    gc.collect()
    assert streamed() is None
    deadline = time.monotonic() + 5
    while lane_threads() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lane_threads() == before


# ---------------------------------------------------------------- shapes and memory

@pytest.mark.parametrize(("tied", "options"), [
    pytest.param(False, {}, id="as it is"), pytest.param(True, {}, id="tied", marks=pytest.mark.nightly),
    pytest.param(True, {"dtype": torch.bfloat16}, id="tied and cast", marks=pytest.mark.nightly)])
def test_the_weights_as_they_were_are_gone_when_a_model_is_streamed_whether_or_not_the_collector_runs(
        tied: bool, options: dict[str, Any]) -> None:
    native = tiny_models.build(tie_word_embeddings=tied)
    before = [StorageWeakRef(parameter.untyped_storage()) for parameter in native.parameters()]
    gc.disable()
    try:
        model = megacompile.stream(native, device="cpu", **options)
        assert before and all(storage.expired() for storage in before)
    finally:
        gc.enable()
    model.megacompile.close()


def test_shapes_longest_unused_are_forgotten(model: Any, native: Any) -> None:
    executables = engine.executables(model)
    limit, executables.limit = executables.limit, 3
    try:
        kept = model(**batch(1, rows=2, length=4)).loss
        with torch.no_grad():
            for length in range(5, 11):
                model(**batch(1, rows=2, length=length))
        assert len(executables) == 3
        lengths = {key[3] for key in engine.binder(model).compiled}
        assert lengths == {4, 9, 10} or lengths == {4, 10}, "variants of forgotten shapes are kept"
        kept.backward()  # its shape was in use
        native(**batch(1, rows=2, length=4)).loss.backward()
        assert_same_gradients(model, native)
        with torch.no_grad():
            assert model(**batch(1, rows=1, length=5)).loss.isfinite()  # compiled again
    finally:
        executables.limit = limit


def test_the_default_bound_on_shapes_is_documented() -> None:
    from megacompile.streaming.programs.executables import MAX_EXECUTABLES
    assert MAX_EXECUTABLES == 32


def test_a_second_forward_that_does_not_fit_is_refused_until_the_first_is_done(model: Any) -> None:
    budget, others = engine.planner(model).budget_bytes, engine.planner(model).taken_bytes
    first = model(**batch(1)).loss
    held = sum(lease.device_bytes for lease in engine.open_forwards(model))
    needed = model.megacompile.compiled().estimate.total
    try:
        engine.captures(model).plan_with(budget_bytes=others + needed + held - 1)
        with pytest.raises(InsufficientMemoryError, match=r"run backward .* before the next forward"):
            model(**batch(2))
        first.backward()  # the refused forward has disturbed nothing
        second = model(**batch(2)).loss
        with pytest.raises(InsufficientMemoryError):
            model(**batch(2))
        del second  # a loss that is dropped gives its memory back
        model(**batch(2)).loss.backward()
    finally:
        engine.captures(model).plan_with(budget_bytes=budget)


def test_a_second_forward_keeps_no_residuals_where_they_do_not_fit(model: Any, native: Any) -> None:
    """Memory that is left over is spent on residuals; two forwards before a backward must not need it."""
    planner, captures, config = engine.planner(model), engine.captures(model), engine.config(model)
    budget, shape = planner.budget_bytes, {"rows": 3, "length": 11}  # a shape of its own: compiled for this budget
    try:
        captures.plan_with(config=replace(config, saved_layers=3))
        kept = model.megacompile.compiled(batch(1, **shape))
        captures.plan_with(config=config)
        assert kept.plan.saved_layers == 3
        captures.plan_with(budget_bytes=planner.taken_bytes + kept.estimate.total)
        first = model(**batch(1, **shape)).loss
        held = sum(lease.device_bytes for lease in engine.open_forwards(model))
        captures.plan_with(budget_bytes=planner.taken_bytes + kept.estimate.total + held - 1)
        second = model(**batch(2, **shape)).loss
        assert sorted(lease.executable.plan.saved_layers for lease in engine.open_forwards(model)) == [0, 3]
    finally:
        captures.plan_with(budget_bytes=budget, config=config)
    for seed, loss in ((1, first), (2, second)):
        loss.backward()
        native(**batch(seed, **shape)).loss.backward()
    assert_same_gradients(model, native)


# ---------------------------------------------------------------- looking

def test_the_handle_shows_program_stages_plan_and_counters(model: Any) -> None:
    handle = model.megacompile
    optimizer = megacompile.AdamW(model.parameters())
    steps = handle.stats["steps"]
    train_step(model, optimizer, rows=3, length=9)
    assert optimizer.grad_norm > 0
    assert handle.plan.micro_batches == (2, 1) and handle.plan.checkpoint_interval == 2
    assert next(iter(handle.stages)) == "model" and [*handle.stages][-1] == "synchronize"
    program = handle.program(batch(0, rows=4))
    assert program.micro_batches == (2, 2) and program == handle.program()
    assert handle.program(batch(0, rows=4), stage="partition").stage == "partition"
    assert "update" in handle.table(batch(0), "update") and "h2d" in handle.table()
    stats = handle.stats
    assert stats["steps"] == steps + 1
    assert stats["parameters"] == sum(p.numel() for p in model.parameters())
    assert stats["host_parts"]["weights"] >= 4 * stats["parameters"]
    assert stats["slot_bytes"] > 0 and 0 < stats["shapes"] <= 32


# ---------------------------------------------------------------- custom architectures

class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device).unsqueeze(-1)
        return x + self.out(torch.tanh(self.mix(self.norm(mean))))


class Decoder(nn.Module):
    """Returns (logits, loss); a larger list that is not a stack of layers would be found first."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(tiny_models.VOCABULARY, width) for _ in range(4))
        self.decoder = nn.Module()
        self.decoder.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, tiny_models.VOCABULARY)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> tuple[Any, Any]:
        x = sum(table(idx) for table in self.tables)
        for block in self.decoder.blocks:
            x = block(x)
        logits = self.head(x)
        loss = None
        if targets is not None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def decoder() -> Decoder:
    torch.manual_seed(1)
    return Decoder()


@pytest.fixture
def registered() -> Any:
    megacompile.register_layers(Decoder, "decoder.blocks")
    yield
    from megacompile.frontend.tracing import layers
    del layers._REGISTERED[Decoder]


def check_decoder(model: Any) -> None:
    native = decoder()
    tokens = batch(1, length=10)["input_ids"]
    idx, targets = tokens[:, :-1], tokens[:, 1:]  # views, as usual
    logits, loss = model(idx, targets)
    true_logits, true_loss = native(idx, targets)
    assert logits is None and loss.item() == pytest.approx(true_loss.item(), rel=1e-6)
    assert torch.equal(model(idx.int(), targets.int())[1], loss)  # torch's own cross entropy takes int64 alone
    loss.backward()
    true_loss.backward()
    assert_same_gradients(model, native)
    with torch.no_grad():
        assert torch.allclose(model(idx, targets=targets)[0], true_logits, atol=1e-6)
        assert torch.allclose(model(idx)[0], true_logits, atol=1e-6) and model(idx)[1] is None


EXAMPLE = {"idx": torch.zeros(2, 4, dtype=torch.long), "targets": torch.zeros(2, 4, dtype=torch.long)}


@pytest.mark.nightly(held_by="tests/model/test_surface.py::test_the_stack_of_layers_can_be_registered_for_a_class")
def test_the_stack_of_layers_can_be_named() -> None:
    model = megacompile.stream(decoder(), device="cpu", layers="decoder.blocks", example=EXAMPLE, micro_batch_size=2)
    assert [c.role for c in model.megacompile.program(EXAMPLE).calls].count("layer") == 3
    check_decoder(model)
    model.megacompile.close()


def test_the_stack_of_layers_can_be_registered_for_a_class(registered: None) -> None:
    model = megacompile.stream(decoder(), device="cpu", example=EXAMPLE)
    check_decoder(model)
    model.megacompile.close()


@pytest.mark.parametrize("kept", ["weights", "weights and state"])
def test_what_is_written_through_data_after_synchronize_counts(kept: str) -> None:
    """Such writes leave no trace: what lives on the device must be sent there again."""
    state = "all" if kept == "weights and state" else ()
    model = megacompile.stream(tiny_models.build(), device="cpu", resident="all", resident_state=state)
    native, losses = tiny_models.build(), []
    for each, kind in ((model, megacompile.AdamW), (native, torch.optim.AdamW)):
        optimizer = kind(each.parameters(), lr=1e-2)
        train_step(each, optimizer)
        if each is model:
            model.megacompile.synchronize()
        for parameter in each.parameters():
            parameter.data.mul_(0.5)
        losses.append([train_step(each, optimizer, seed) for seed in (1, 2)])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    tiny_models.assert_same_weights(model, native)
    model.megacompile.close()


@pytest.mark.parametrize(("cast", "remedy"), [
    (lambda module: module.bfloat16(), "dtype="), (lambda module: module.double(), "dtype="),
    (lambda module: module.to("meta"), "computes on cpu")])
def test_a_module_around_it_is_told_what_cannot_be_done(model: Any, cast: Any, remedy: str) -> None:
    with pytest.raises(UnsupportedError, match=remedy):
        cast(nn.Sequential(model))


# ---------------------------------------------------------------- optimizer states from elsewhere

@pytest.mark.parametrize("which", ["model", "bf16_model"])
def test_a_parameter_without_a_saved_state_starts_anew(request: pytest.FixtureRequest, which: str) -> None:
    """As `torch.optim` does: a state of an optimizer that has made no step has none."""
    model = request.getfixturevalue(which)
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
    train_step(model, optimizer)
    fresh = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(p.shape)) for p in model.parameters()], lr=1e-3)
    optimizer.load_state_dict(fresh.state_dict())
    assert optimizer.param_groups[0]["lr"] == 1e-3
    for state in optimizer.state.values():
        assert state["step"] == 0
        assert not any(value.any() for value in state.values() if isinstance(value, torch.Tensor))
    train_step(model, optimizer)
    model.megacompile.synchronize()
    assert all(state["step"] == 1 and state["exp_avg"].any() for state in optimizer.state.values())


# ---------------------------------------------------------------- plain modules

class PlainDecoder(nn.Module):
    """Has a `device` of its own, and none of what transformers adds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 4), nn.Linear(4, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_a_plain_module_gains_no_methods_of_transformers_and_keeps_its_own_attributes() -> None:
    model = megacompile.stream(PlainDecoder(), device="cpu")
    assert not hasattr(model, "save_pretrained")
    assert not hasattr(model, "generate")
    model.device = "its own"
    assert model.device == "its own"
    assert model.to("cpu") is model
    model.megacompile.close()
    assert type(model) is PlainDecoder


def test_values_outside_tiles_are_copied_from_another_device_to_the_host() -> None:
    model = PlainDecoder()
    with FakeTensorMode():
        model.register_buffer("elsewhere", torch.empty(3, device="cuda"))
    move_rest(model, Tiling({}, {}, {}, {}, {}, {}))
    assert model.elsewhere.device.type == "cpu"
