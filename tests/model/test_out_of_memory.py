"""Out of device memory in the middle of a step: nothing has changed, the error says what to do, and a smaller batch runs."""
from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import engine
import pytest
import torch
from tiny_models import batch, same_bits, train_step, weights

import megacompile
from megacompile.errors import DeviceMemoryError, InsufficientMemoryError, LaneError
from megacompile.ir.program import argument, op_of
from megacompile.runtime import operations
from megacompile.runtime.kernels import Activation


class Allocator:
    """What a device's allocator does, for the results of templates: counts the bytes that are alive, and gives no more than
    `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.peak = limit, 0, 0
        self._lock = threading.Lock()

    def take(self, tensor: torch.Tensor) -> None:
        with self._lock:
            if self.used + tensor.nbytes > self.limit:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {tensor.nbytes} bytes.\nmore lines")
            self.used += tensor.nbytes
            self.peak = max(self.peak, self.used)
        weakref.finalize(tensor, self.give, tensor.nbytes)

    def give(self, size: int) -> None:
        with self._lock:
            self.used -= size


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    found = Allocator(1 << 40)

    def counted(op: Callable[..., Any]) -> Callable[..., Any]:
        def run(frame: Any, node: Any) -> Any:
            result = op(frame, node)
            if isinstance(result, Activation):
                for tensor in result.outputs:
                    found.take(tensor)
            return result
        return run

    for name in ("forward", "forward_saving", "loss", "recompute_backward", "backward"):
        monkeypatch.setitem(operations.OPERATIONS, name, counted(operations.OPERATIONS[name]))
    return found


@pytest.mark.parametrize("kind", ["loop", "whole step"])
def test_a_step_that_does_not_fit_changes_nothing_and_a_smaller_one_runs(model: Any, allocator: Allocator, kind: str) -> None:
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)

    def step(seed: int, rows: int) -> None:
        if kind == "loop":
            train_step(model, optimizer, seed, rows=rows)
        else:
            model.megacompile.train_step(batch(seed, rows=rows), optimizer)

    step(0, 2)
    model.megacompile.synchronize()
    small, allocator.peak = allocator.peak, 0
    step(0, 6)
    model.megacompile.synchronize()
    assert allocator.peak > 1.5 * small
    before, allocator.limit = weights(model), int(1.2 * small)
    with pytest.raises(DeviceMemoryError) as caught:
        step(1, 6)
    text = str(caught.value).splitlines()
    assert "out of device memory" in text[0] and "no weight has changed: run a smaller batch" in text[0]
    assert "tokens predicted" in text[0] and "and the budget is" in text[0]
    assert "the allocator said: CUDA out of memory." in text[1]
    assert isinstance(caught.value, InsufficientMemoryError) and isinstance(caught.value, LaneError)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert same_bits(weights(model), before)
    optimizer.zero_grad()
    step(1, 2)  # though the error, with its traceback, is still in somebody's hands
    assert all(state["step"] == 3 for state in optimizer.state_dict()["state"].values())
    assert not same_bits(weights(model), before)


def test_a_slot_that_cannot_be_allocated_raises_and_training_can_continue(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    train_step(model, megacompile.AdamW(model.parameters()))
    before = weights(model)

    with monkeypatch.context() as patch:
        patch.setattr(engine.backend(model), "memory", full)
        arena = engine.arena(model)
        arena.forget(next(name for name in arena.slots if name.startswith("W")))  # which a forward needs
        with pytest.raises(DeviceMemoryError, match="making a slot or a result"):
            model(**batch())
    assert same_bits(weights(model), before)
    model(**batch()).loss.backward()


def full(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def _resident_in_backward(model: Any, patch: pytest.MonkeyPatch) -> Callable[[], Any]:
    loss = model(**batch()).loss
    model.megacompile.synchronize()  # what lives on the device is loaded anew
    patch.setattr(engine.residency(model), "_run", full)
    return loss.backward


def _resident_in_update(model: Any, patch: pytest.MonkeyPatch) -> Callable[[], Any]:
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
    model(**batch()).loss.backward()
    model.megacompile.synchronize()
    patch.setattr(engine.residency(model), "_run", full)
    return optimizer.step


def _state_to_store(model: Any, patch: pytest.MonkeyPatch) -> Callable[[], Any]:
    model(**batch())
    patch.setattr(engine.residency(model), "state_ahead", True)
    patch.setattr(engine.residency(model), "_run", full)
    return model.megacompile.synchronize


def _buffer(model: Any, patch: pytest.MonkeyPatch) -> Callable[[], Any]:
    optimizer = megacompile.AdamW(model.parameters())
    patch.setattr(engine.constants(model), "stale", lambda: True)
    patch.setattr(engine.constants(model), "refresh", full)
    return optimizer.state_dict


def _loss(model: Any, patch: pytest.MonkeyPatch) -> Callable[[], Any]:
    patch.setattr("megacompile.streaming.batch_io.loss_of", full)
    return lambda: model(**batch())


def _loss_of_whole_step(model: Any, patch: pytest.MonkeyPatch) -> Callable[[], Any]:
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
    patch.setattr("megacompile.streaming.batch_io.loss_of", full)
    return lambda: model.megacompile.train_step(batch(), optimizer)


def _gradient_of_loss(model: Any, patch: pytest.MonkeyPatch) -> Callable[[], Any]:
    loss = model(**batch()).loss
    patch.setattr("megacompile.streaming.batch_io.send_gradients", full)
    return loss.backward


def _logits(model: Any, patch: pytest.MonkeyPatch) -> Callable[[], Any]:
    patch.setattr("megacompile.streaming.batch_io.outputs_of", full)
    return lambda: model(input_ids=batch()["input_ids"])


def _logits_of_evaluation(model: Any, patch: pytest.MonkeyPatch) -> Callable[[], Any]:
    patch.setattr("megacompile.streaming.batch_io.outputs_of", full)
    return lambda: torch.no_grad()(model)(input_ids=batch()["input_ids"])


def _loss_of_evaluation(model: Any, patch: pytest.MonkeyPatch) -> Callable[[], Any]:
    patch.setattr("megacompile.streaming.batch_io.evaluation_of", full)
    return lambda: torch.no_grad()(model)(**batch())


def _hidden_states(model: Any, patch: pytest.MonkeyPatch) -> Callable[[], Any]:
    patch.setattr("megacompile.streaming.batch_io.outputs_and_hidden_states_of", full)
    return lambda: torch.no_grad()(model)(input_ids=batch()["input_ids"], output_hidden_states=True)


def _arguments(model: Any, patch: pytest.MonkeyPatch) -> Callable[[], Any]:
    patch.setattr("megacompile.inputs.batch.align_patches", full)  # images, on the device
    return lambda: model(**batch())


def _arguments_of_whole_step(model: Any, patch: pytest.MonkeyPatch) -> Callable[[], Any]:
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
    patch.setattr("megacompile.inputs.batch.align_patches", full)
    return lambda: model.megacompile.train_step(batch(), optimizer)


def _unpacking(read: Callable[[Any, dict[str, Any]], Any]) -> Callable[..., Callable[[], Any]]:
    def prepare(model: Any, patch: pytest.MonkeyPatch) -> Callable[[], Any]:
        ids = batch(rows=4, length=40)["input_ids"]
        mask = (torch.arange(40) < torch.tensor([40, 3, 4, 5])[:, None]).long()
        patch.setattr(engine.captures(model).repacking, "least", 64)
        patch.setattr("megacompile.inputs.packed_layout.Layout.unpack", full)
        return lambda: read(model, {"input_ids": ids, "attention_mask": mask})
    prepare.__name__ = read.__name__
    return prepare


def _padded_logits(model: Any, given: dict[str, Any]) -> Any:
    return model(**given)


def _padded_logits_of_evaluation(model: Any, given: dict[str, Any]) -> Any:
    return torch.no_grad()(model)(**given)


def _padded_hidden_states(model: Any, given: dict[str, Any]) -> Any:
    return torch.no_grad()(model)(**given, output_hidden_states=True)


def _padded_last_hidden_state(model: Any, given: dict[str, Any]) -> Any:
    return torch.no_grad()(model.megacompile.last_hidden_state)(given)


def _padded_values(model: Any, given: dict[str, Any]) -> Any:
    return torch.no_grad()(model.megacompile.per_token)(lambda logits: logits.logsumexp(-1), given)


_UNPACKING = [_unpacking(read) for read in (_padded_logits, _padded_logits_of_evaluation, _padded_hidden_states,
                                           _padded_last_hidden_state, _padded_values)]


@pytest.mark.sample(5)
@pytest.mark.parametrize("prepare", [
    _resident_in_backward, _resident_in_update, _state_to_store, _buffer, _loss, _loss_of_whole_step, _gradient_of_loss,
    _logits, _logits_of_evaluation, _loss_of_evaluation, _hidden_states, _arguments, _arguments_of_whole_step, *_UNPACKING])
def test_out_of_memory_is_explained_once_wherever_it_happens(bf16_model: Any, monkeypatch: pytest.MonkeyPatch,
                                                             prepare: Callable[..., Callable[[], Any]]) -> None:
    model, before = bf16_model, weights(bf16_model)
    with monkeypatch.context() as patch:
        call = prepare(model, patch)
        with pytest.raises(DeviceMemoryError) as caught:
            call()
    text = str(caught.value)
    assert text.count("out of device memory") == text.count("the allocator said: CUDA out of memory.") == 1, text
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert same_bits(weights(model), before)
    kept_by_error = prepare in (_resident_in_backward, _UNPACKING[0])
    assert kept_by_error or not engine.open_forwards(model), "what it holds would be missing"
    model.zero_grad()
    model(**batch()).loss.backward()  # the next step runs
    del call, caught
    gc.collect()  # the traceback holds the forward whose backward failed


def test_an_update_on_the_device_that_runs_out_of_memory_says_whether_weights_are_torn(model: Any) -> None:
    """On arrival, after the first tile: then they are."""
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, overlap="backward")
    train_step(model, optimizer)
    start = weights(model)
    seen: list[str] = []

    def probe(node: Any) -> None:
        if op_of(node).name == "update":
            seen.append(argument(node, "tile"))
            if len(seen) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")

    def step() -> None:
        train_step(model, optimizer)
        model.megacompile.synchronize()  # the update may be on its way yet

    engine.probe(model, probe)
    with pytest.raises(DeviceMemoryError, match="the weights are torn"):
        step()
    model.load_state_dict(start)
