"""Models whose code does something else for some lengths: they are captured again there, and equal native PyTorch."""
from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import engine
import pytest
import tiny_models
import torch
from chunked_models import CHUNK, Layer, model_of, tokens
from tiny_models import assert_same_gradients
from torch import Tensor

import megacompile
from megacompile.errors import UnsupportedError
from megacompile.frontend.capture import capture
from megacompile.streaming.programs import captures


class DropsFullChunks(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.shape[1] % CHUNK else self.drop(x))


class LoopsOverChunks(Layer):
    """Reads the first token of each chunk, as a loop over chunks; each number of chunks is another graph."""

    def forward(self, x: Tensor) -> Tensor:
        made = torch.tanh(self.first(x))
        state = made[:, :1]
        for number in range(-(-x.shape[1] // CHUNK)):
            state = state / 2 + made[:, number * CHUNK:number * CHUNK + 1]
        return x + made + state


class ChangesAtOneLength(Layer):
    """Computes something else for one exact length, as a stride does that one length shares with another."""

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        return made * 2 if x.shape[1] == CHUNK else made


def check(ours: Any, native: Any, length: int) -> None:
    """The same loss, gradients and logits without labels, on a batch of this length."""
    for model in (ours, native):
        model.zero_grad()
    ids = tokens(length)
    losses = [model(input_ids=ids, labels=ids)["loss"] for model in (ours, native)]
    for loss in losses:
        loss.backward()
    assert torch.allclose(*losses, rtol=1e-6), length
    assert_same_gradients(ours, native)
    with torch.no_grad():
        assert torch.allclose(ours(input_ids=ids)["logits"], native(input_ids=ids)["logits"], atol=1e-6)


def captures_of(model: Any) -> int:
    return len(list(engine.captures(model)))


def test_each_branch_on_the_length_is_captured_once_when_it_first_comes() -> None:
    native = model_of(Layer)
    ours = megacompile.stream(copy.deepcopy(native), device="cpu")
    for length, count in ((17, 1), (13, 1), (8, 2), (16, 2), (3, 3), (2, 3), (17, 3), (20, 3)):
        check(ours, native, length)
        assert captures_of(ours) == count, length
    ours.megacompile.close()


def test_a_whole_step_trains_alike_with_lengths_on_both_sides_of_a_branch() -> None:
    native = model_of(Layer)
    ours = megacompile.stream(copy.deepcopy(native), device="cpu", micro_batch_size=1)
    optimizer = megacompile.AdamW(ours.parameters(), lr=1e-2)
    reference = torch.optim.AdamW(native.parameters(), lr=1e-2)
    for length in (17, 8, 3, 2, 12, 17):
        ids = tokens(length)
        loss = ours.megacompile.train_step({"input_ids": ids, "labels": ids}, optimizer)
        theirs = native(input_ids=ids, labels=ids)["loss"]
        theirs.backward()
        reference.step()
        reference.zero_grad()
        assert torch.allclose(torch.as_tensor(loss), theirs, rtol=1e-5), length
    for name, weight in ours.state_dict().items():
        assert torch.allclose(weight, native.state_dict()[name], atol=1e-5), name


@pytest.mark.nightly(
    held_by="tests/model/test_traced_lengths.py::test_a_length_at_which_rows_are_computed_together_is_refused_where_they_are_not_else")
@pytest.mark.parametrize("training", [True, False])
def test_a_length_at_which_evaluation_differs_is_refused_where_it_does_not_differ_else(training: bool) -> None:
    """Batches are read for the first capture, which says that modules in either mode compute the same."""
    model = megacompile.stream(model_of(DropsFullChunks), device="cpu").train(training)
    ids = tokens(8)
    with torch.set_grad_enabled(training), pytest.raises(UnsupportedError, match="a batch of 2 x 8 breaks"):
        model(input_ids=ids, labels=ids)


def test_a_length_at_which_rows_are_computed_together_is_refused_where_they_are_not_else() -> None:
    """The batch could not be split, and the first capture says that it can."""
    class Centered(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.shape[1] % CHUNK else x - x.mean(0, keepdim=True))

    model = megacompile.stream(model_of(Centered), device="cpu")
    ids = tokens(8)
    with pytest.raises(UnsupportedError, match=r"(?s)a batch of 2 x 8 breaks.*treats padding, rows or evaluation differently"):
        model(input_ids=ids, labels=ids)


@pytest.mark.nightly(held_by=(
    "tests/model/test_traced_lengths.py::test_a_whole_step_trains_alike_with_lengths_on_both_sides_of_a_branch",
    "tests/model/test_packing.py::test_loss_and_gradients_are_native_pytorchs"))
@pytest.mark.parametrize("length", [13, 24])
def test_rows_are_packed_only_where_that_changes_no_branch(length: int) -> None:
    """Packed rows have 32 tokens, for which the model does something else than for the rows of the batch."""
    def layers(model: Any) -> Any:
        for layer in model.model.layers:
            layer.mlp.forward = MethodType(_halved_from_21, layer.mlp)
        return model

    native = layers(tiny_models.build(num_hidden_layers=1))
    ours = megacompile.stream(layers(tiny_models.build(num_hidden_layers=1)), device="cpu", repack=32)
    ids = tokens(length, rows=4)
    mask = (torch.arange(length) < torch.tensor([length, 5, 4, 6])[:, None]).long()
    batch = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}
    losses = [model(**batch).loss for model in (ours, native)]
    assert torch.allclose(*losses, rtol=1e-6)
    assert "branches on the length" in ours.megacompile.explain(batch, hardware="h200")
    for loss in losses:
        loss.backward()
    assert_same_gradients(ours, native)


def _halved_from_21(self: Any, x: Tensor) -> Tensor:
    made: Tensor = type(self).forward(self, x)
    return made / 2 if x.shape[1] > 20 else made


def test_lengths_that_each_need_a_capture_are_refused_after_some_with_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "MOST_LENGTHS", most := 2)  # eight captures take as many seconds
    native = model_of(LoopsOverChunks)
    ours = megacompile.stream(copy.deepcopy(native), device="cpu")
    chunks = [number for number in range(1, most + 1) if number != 5]  # five are captured at first
    for number in chunks:
        check(ours, native, number * CHUNK - 1)
    assert captures_of(ours) == most + 1
    ids = tokens((most + 1) * CHUNK - 1)
    with pytest.raises(UnsupportedError, match=r"a batch of 2 x 11 breaks .*test_traced_lengths.py:\d+ .*for number in range"):
        ours(input_ids=ids, labels=ids)
    check(ours, native, 7)


@pytest.mark.nightly(
    held_by="tests/model/test_traced_lengths.py::test_lengths_that_each_need_a_capture_are_refused_after_some_with_the_line")
def test_a_length_at_which_the_model_raises_is_refused_by_its_condition() -> None:
    class Bounded(Layer):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] > 32:
                raise ValueError("too long")
            return super().forward(x)

    model = megacompile.stream(model_of(Bounded), device="cpu")
    ids = tokens(33)
    refusal = r"(?s)a batch of 2 x 33 breaks T <= 32.*another capture, for 33 tokens, failed: .*too long"
    with pytest.raises(UnsupportedError, match=refusal):
        model(input_ids=ids, labels=ids)
    assert captures_of(model) == 1


@pytest.mark.nightly(held_by="tests/model/test_editing.py::test_a_safe_edit_runs_and_changes_no_bit")
def test_a_program_for_another_branch_can_be_saved_edited_and_loaded() -> None:
    ours = megacompile.stream(model_of(Layer), device="cpu")
    ids = tokens(8)
    before = ours(input_ids=ids, labels=ids)["loss"].item()
    text = ours.megacompile.text()
    ours.megacompile.load_program(text)
    assert ours.megacompile.compiled({"input_ids": ids, "labels": ids}).loaded
    assert ours(input_ids=ids, labels=ids)["loss"].item() == before


def test_a_condition_says_what_a_capture_holds_for() -> None:
    captured = capture(model_of(Layer))
    assert captured.holds_at(13) and not captured.holds_at(16) and not captured.holds_at(3)


@pytest.mark.nightly(
    held_by="tests/model/test_traced_lengths.py::test_each_branch_on_the_length_is_captured_once_when_it_first_comes")
def test_a_length_that_the_code_compares_with_is_captured_for_itself() -> None:
    native = model_of(ChangesAtOneLength)
    ours = megacompile.stream(copy.deepcopy(native), device="cpu")
    for length in (17, CHUNK, 2 * CHUNK, CHUNK, CHUNK - 1):
        check(ours, native, length)
    ours.megacompile.close()
