"""Batches that are not packed have few lengths: they are padded to the next one where no result shows it."""
from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import trained
import uneven_models
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import right_padded, step_of_both
from torch import Tensor
from uneven_models import LONGEST, assert_same_step, stream

import megacompile
from megacompile.errors import PaddingWarning
from megacompile.inputs.rounded_lengths import is_usual, rounded
from megacompile.trainer import Trainer

twins = pytest.fixture(scope="module")(uneven_models.twins)


@given(st.integers(1, 40_000), st.integers(1, 9000), st.integers(1, 100))
def test_a_width_holds_the_rows_and_is_at_most_half_as_long_again_unless_they_are_short(
        length: int, usual: int, rows: int) -> None:
    width = rounded(length, usual, rows)
    assert length <= width and rounded(width, usual, rows) == rounded(width, usual, max(rows, 17)) == width
    assert width <= max(1.5 * length + 1, usual / 4)


@given(st.integers(1, 3000), st.integers(1, 16))
def test_there_are_at_most_eight_widths(usual: int, rows: int) -> None:
    assert len({rounded(length, usual, rows) for length in range(1, usual + 1)}) <= 8


def test_widths_are_lengths_that_rows_are_often_cut_to() -> None:
    widths = {rounded(length, 2048) for length in range(1, 8193)}
    assert widths == {128, 256, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192}
    assert rounded(30, 2048, rows=64) == 32 and rounded(30, 2048, rows=16) == 128


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 45), min_size=1, max_size=6), st.integers(0, 9))
def test_rounded_batches_train_as_native_pytorch_trains_them(twins: tuple[Any, Any], lengths: list[int], seed: int) -> None:
    model, _ = twins
    batch = right_padded([*lengths, 7], seed)
    assert_same_step(twins, batch)
    longest = max(*lengths, 7)
    wanted = longest if set(lengths) == {7} else rounded(longest, LONGEST)  # rows of one length keep it
    assert model.megacompile.compiled(batch).spec.length == wanted


@pytest.mark.nightly(
    held_by="tests/model/test_compiled_values.py::test_values_of_tokens_are_compiled_and_train_as_native_pytorch")
def test_values_of_tokens_come_back_without_those_of_the_padding(twins: tuple[Any, Any]) -> None:
    model, _ = twins
    batch = right_padded([21, 9, 13])
    present = batch["attention_mask"].bool()
    del batch["labels"]

    def surest(logits: Tensor) -> Tensor:
        return logits.max(dim=-1).values

    with torch.no_grad():
        ours, theirs = (each(**batch, use_cache=False).logits for each in twins)
        values = model.megacompile.per_token(surest, batch)
    assert ours.shape == theirs.shape == (3, 21, tiny_models.VOCABULARY) and values.shape == (3, 21)
    torch.testing.assert_close(ours[present], theirs[present], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(values[present], theirs.max(dim=-1).values[present], rtol=1e-4, atol=1e-5)


@pytest.mark.nightly(held_by=(
    "tests/model/test_packing.py::test_loss_and_gradients_are_native_pytorchs",
    "tests/model/test_rounded_lengths.py::test_training_says_once_that_most_of_a_batch_is_padding"))
def test_padding_on_the_left_is_not_made_longer(twins: tuple[Any, Any]) -> None:
    """A token of padding on the left sees no token, and then transformers lets it see all: one more would change its value,
    which predicts the row's first token."""
    batch = {name: tensor.flip(1) for name, tensor in right_padded([21, 9, 13]).items()}
    ours, theirs = (each(**batch, use_cache=False).loss.item() for each in twins)
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert twins[0].megacompile.compiled(batch).spec.length == 21


def test_rows_of_one_length_keep_it(twins: tuple[Any, Any]) -> None:
    assert twins[0].megacompile.compiled(tiny_models.batch(rows=3, length=21)).spec.length == 21
    assert twins[0].megacompile.compiled(tiny_models.batch(rows=1, length=21)).spec.length == 24


@pytest.mark.nightly(held_by=(
    "tests/model/test_rounded_lengths.py::test_rounded_batches_train_as_native_pytorch_trains_them",
    "tests/model/test_rounded_lengths.py::test_there_are_at_most_eight_widths"))
@pytest.mark.parametrize("whole", [False, True], ids=["loop", "whole steps"])
def test_thirty_steps_of_a_loop_have_at_most_eight_shapes_and_train_as_native_pytorch(
        twins: tuple[Any, Any], whole: bool) -> None:
    """Steps of one to four rows."""
    native = copy.deepcopy(twins[1])
    model = stream(native)
    optimizers = megacompile.AdamW(model.parameters(), lr=1e-3), torch.optim.AdamW(native.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    widths = set()
    for step in range(30):
        lengths = torch.empty(1 + step % 4).log_normal_(2.5, 0.9, generator=generator).clamp(3, LONGEST).long().tolist()
        batch = right_padded(lengths, seed=step)
        torch.testing.assert_close(*step_of_both(model, native, optimizers, batch, whole), rtol=1e-5, atol=1e-5)
        widths.add(model.megacompile.compiled().spec.length)
    assert 4 < len(widths) <= 8 and max(widths) <= LONGEST
    model.megacompile.close()


@pytest.mark.nightly(
    held_by="tests/model/test_rounded_lengths.py::test_there_are_at_most_eight_widths")
def test_thirty_steps_of_rows_that_are_not_packed_have_few_shapes(twins: tuple[Any, Any], tmp_path: Path) -> None:
    model = stream(twins[1])
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(120).log_normal_(3.0, 0.8, generator=generator).clamp(3, 60).long().tolist()
    rows = [{"input_ids": torch.arange(length) % tiny_models.VOCABULARY} for length in lengths]
    with pytest.warns(PaddingWarning, match="computed with its padding"):
        trained.run(Trainer, tmp_path, model, given=dict(train_dataset=rows), max_steps=30, per_device_train_batch_size=4)
    stats = model.megacompile.stats
    assert stats["steps"] == 30 and stats["plan_searches"] + stats["plans_from_cache"] <= 8
    model.megacompile.close()


def test_a_row_at_a_time_shares_the_shapes_of_packed_rows() -> None:
    model = megacompile.stream(tiny_models.build(), device="cpu", repack=64)
    native = tiny_models.build()
    specs = set()
    for length in range(3, 40):
        batch = tiny_models.batch(length, rows=1, length=length)
        ours, theirs = (each(**batch, use_cache=False).loss.item() for each in (model, native))
        assert ours == pytest.approx(theirs, rel=1e-6)
        specs.add(model.megacompile.compiled(batch).spec)
    packed = {(spec.batch, spec.length) for spec in specs if spec.capture.further}
    assert packed == {(1, 64)} and all(is_usual(spec.length) for spec in specs)
    model.megacompile.close()


@pytest.mark.parametrize("reason", ["padding on the left predicts a target", "repack=False"])
def test_training_says_once_that_most_of_a_batch_is_padding(reason: str) -> None:
    model = megacompile.stream(tiny_models.build(), device="cpu", repack="left" in reason)
    batch = right_padded([40, 3, 3])
    if "left" in reason:
        batch = {name: tensor.flip(1) for name, tensor in batch.items()}
        with pytest.warns(PaddingWarning, match="padding on the left predicts a target: .*-100"):
            model(**batch).loss.backward()
    with warnings.catch_warnings():  # not again, and not if the user has turned packing off
        warnings.simplefilter("error", PaddingWarning)
        model(**batch).loss.backward()
    model.megacompile.close()


def test_a_batch_without_a_target_is_told_apart_from_padding() -> None:
    model, native = stream(tiny_models.build()), tiny_models.build()
    batch = tiny_models.batch(0)
    batch["labels"].fill_(-100)
    with pytest.warns(PaddingWarning, match="none of its tokens counts for the loss: leave the batch out"):
        loss = model(**batch).loss
    loss.backward()
    assert loss.isnan() and native(**batch).loss.isnan()
    assert all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)
    model.megacompile.close()
