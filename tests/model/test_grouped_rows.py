"""Rows that are not packed are grouped by length within a step, so that each group is padded to its own longest row."""
from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import engine
import numpy as np
import pytest
import tiny_models
import torch
import trained
import transformers
import uneven_models
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import right_padded, step_of_both
from torch import Tensor, nn
from uneven_models import LONGEST, UNEVEN, assert_same_step, build, lower_the_cost, stream, uneven, widths_of

import megacompile
from megacompile.errors import PaddingWarning
from megacompile.inputs import packed_layout
from megacompile.inputs.packed_layout import GroupedRows, Grouping, grouped, lengths_of_rows
from megacompile.inputs.repacking import Repacking
from megacompile.inputs.rounded_lengths import RightPadding, padding_for, rounded
from megacompile.ir.plan import FULL_TOKENS
from megacompile.trainer import Trainer

short_rows = pytest.fixture(autouse=True)(lower_the_cost)
twins = pytest.fixture(scope="module")(uneven_models.twins)


# ---------------------------------------------------------------- groups
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40), st.sampled_from([Grouping.FEW_NUMBERS, Grouping.ANY_NUMBER]))
def test_groups_hold_all_tokens_of_each_row_in_micro_batches_that_fill_kernels(lengths: list[int], grouping: Grouping) -> None:
    found = grouped((len(lengths), max(lengths)), lengths, widths_of(lengths, 2048), grouping)
    assert sorted(found.order.tolist()) == list(range(len(lengths)))
    widths = [length for rows, length in found.groups for _ in range(rows)]
    assert all(lengths[row] <= width for row, width in zip(found.order.tolist(), widths, strict=True))
    assert all(rows == 1 or rows * length <= FULL_TOKENS for rows, length in found.groups)
    assert list(found.groups) == sorted(found.groups, key=lambda group: -group[1])
    if grouping is Grouping.FEW_NUMBERS:
        assert {rows for rows, _ in found.groups} <= {1, 4, 16, 64}


@given(st.lists(st.integers(1, 90), min_size=1, max_size=12), st.integers(0, 30))
def test_values_come_back_in_the_order_and_length_of_the_batch(lengths: list[int], more: int) -> None:
    size = len(lengths), max(lengths) + more
    layout = grouped(size, lengths, widths_of(lengths, 64), Grouping.ANY_NUMBER)
    values = torch.arange(1, size[0] * size[1] + 1).view(size)
    values.masked_fill_(torch.arange(size[1]) >= torch.tensor(lengths)[:, None], 0)
    assert torch.equal(layout.unpack(layout.pack(values)), values)
    assert layout.pack(values).shape == (size[0], layout.length)


def test_a_row_is_as_long_as_its_last_token_or_target() -> None:
    present = np.array([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]], dtype=bool)
    labels = torch.tensor([[-100, -100, -100, 5], [-100] * 4, [-100] * 4])
    assert lengths_of_rows(present, []) == [2, 3, 1] and lengths_of_rows(present, [labels]) == [4, 3, 1]


def test_groups_of_instructions_compute_a_third_of_the_tokens_in_few_micro_batches() -> None:
    generator = np.random.default_rng(0)
    steps = [np.clip(np.exp(generator.normal(np.log(180), 0.9, 64)), 8, 2000).astype(int).tolist() for _ in range(30)]
    useful, padded = sum(map(sum, steps)), sum(64 * rounded(max(step), 2048) for step in steps)

    def groups(grouping: Grouping) -> list[GroupedRows]:
        return [grouped((64, max(step)), step, widths_of(step, 2048), grouping) for step in steps]

    packed_layout.TOKENS_OF_A_GROUP = 512  # restored by the fixture
    few, many = groups(Grouping.FEW_NUMBERS), groups(Grouping.ANY_NUMBER)
    assert 1 - useful / padded > 0.8
    for found, share in ((few, 0.35), (many, 0.27)):
        assert 1 - useful / sum(each.tokens for each in found) < share
    assert len({group for each in few for group in each.groups}) <= 24
    assert len({length for each in many for _, length in each.groups}) <= 8
    assert max(len(each.groups) for each in many) <= 8


# ---------------------------------------------------------------- training
@settings(max_examples=15)
@given(st.lists(st.integers(1, 100), min_size=3, max_size=10), st.integers(0, 9))
def test_grouped_batches_train_as_native_pytorch_trains_them(twins: tuple[Any, Any], lengths: list[int], seed: int) -> None:
    model, _ = twins
    batch = right_padded([*lengths, 60, 3, 4], seed)
    assert_same_step(twins, batch)
    assert len(set(model.megacompile.plan.lengths)) > 1


@pytest.mark.sample(4)
@pytest.mark.parametrize("options", [
    dict(), dict(micro_batch_size=2), dict(checkpoint_interval=2), dict(host_checkpoints=True),
    dict(token_chunk=8), dict(saved_layers=2),
    dict(dynamic=False)], ids=lambda options: next(iter(options), "as planned"))
@pytest.mark.parametrize("whole", [False, True], ids=["loop", "whole steps"])
def test_steps_of_uneven_rows_train_as_native_pytorch(options: dict[str, Any], whole: bool) -> None:
    native = build()
    model = stream(native, **options)
    optimizers = megacompile.AdamW(model.parameters(), lr=1e-3), torch.optim.AdamW(native.parameters(), lr=1e-3)
    for step in range(5):
        batch = right_padded(uneven(step), seed=step)
        torch.testing.assert_close(*step_of_both(model, native, optimizers, batch, whole), rtol=1e-5, atol=1e-5)
        plan = model.megacompile.plan
        assert len(set(plan.lengths)) > 1 and plan.tokens < 0.6 * plan.batch * plan.length
        assert max(plan.micro_batches) <= options.get("micro_batch_size", 12)
    model.megacompile.synchronize()
    for (name, one), two in zip(model.named_parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(one.data, two.data, rtol=1e-4, atol=1e-5, msg=name)
    model.megacompile.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [dict(waves=2), dict(waves=3, host_sums="all"), dict(waves=2, host_checkpoints=2)],
                         ids=lambda options: ", ".join(options))
def test_waves_of_grouped_rows_have_the_same_gradients(options: dict[str, Any]) -> None:
    native, batch = build(), right_padded(uneven(1))
    model = stream(native, micro_batch_size=2, **options)
    ours, theirs = megacompile.SGD(model.parameters(), lr=0.5), torch.optim.SGD(native.parameters(), lr=0.5)
    model.megacompile.train_step(batch, ours)
    native(**batch, use_cache=False).loss.backward()
    theirs.step()
    model.megacompile.synchronize()
    assert model.megacompile.plan.waves > 1 and model.megacompile.plan.lengths
    for (name, one), two in zip(model.named_parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(one.data, two.data, rtol=1e-5, atol=1e-6, msg=name)
    model.megacompile.close()


@pytest.mark.nightly(held_by=(
    "tests/model/test_dropout.py::test_every_plan_has_the_loss_and_gradients_of_native_pytorch_with_the_same_masks",
    "tests/model/test_grouped_rows.py::test_steps_of_uneven_rows_train_as_native_pytorch"))
def test_dropout_is_the_same_however_groups_are_split_and_differs_between_groups() -> None:
    native = build()
    for layer in native.model.layers:
        layer.feed_forward.w2 = nn.Sequential(layer.feed_forward.w2, nn.Dropout(0.5))
    values = []
    for size in (None, 1):
        torch.manual_seed(0)
        model = stream(native, micro_batch_size=size)
        batch = right_padded([64, 30, 8, 8, 8, 8])
        batch["input_ids"][:] = batch["input_ids"][0]  # rows differ by their masks alone
        del batch["labels"]
        values.append(model.megacompile.last_hidden_state(batch).detach())
        assert len(set(model.megacompile.plan.lengths)) > 1
        model.megacompile.close()
    torch.testing.assert_close(*values, rtol=1e-5, atol=1e-6)
    first = values[0][:, :8]
    assert not any(torch.equal(first[row], first[other]) for row in range(6) for other in range(row))


# ---------------------------------------------------------------- values
@pytest.mark.nightly(held_by=(
    "tests/model/test_grouped_rows.py::test_grouped_batches_train_as_native_pytorch_trains_them",
    "tests/model/test_grouped_rows.py::test_values_come_back_in_the_order_and_length_of_the_batch"))
def test_values_and_gradients_of_tokens_are_those_of_native_pytorch(twins: tuple[Any, Any]) -> None:
    model, native = twins
    batch = right_padded(UNEVEN)
    present = batch["attention_mask"].bool()
    labels = batch.pop("labels").clamp(min=0)
    with torch.no_grad():
        logits = [each(**batch, use_cache=False).logits for each in twins]
    assert logits[0].shape == logits[1].shape
    torch.testing.assert_close(logits[0][present], logits[1][present], rtol=1e-4, atol=1e-5)

    def chosen(logits: Tensor, labels: Tensor) -> Tensor:
        return logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]

    values = model.megacompile.per_token(chosen, batch, labels=labels)
    theirs = native(**batch, use_cache=False).logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(values[present], theirs[present], rtol=1e-4, atol=1e-5)
    for each in (values, theirs):
        (each[present] * torch.arange(int(present.sum()))).mean().backward()
    tiny_models.assert_same_gradients(model, native)
    for each in twins:
        each.zero_grad()
    assert model.megacompile.plan.lengths


@pytest.mark.nightly(held_by=(
    "tests/model/test_grouped_rows.py::test_grouped_batches_train_as_native_pytorch_trains_them",
    "tests/model/test_grouped_rows.py::test_values_come_back_in_the_order_and_length_of_the_batch"))
def test_hidden_states_and_evaluations_are_those_of_native_pytorch(twins: tuple[Any, Any]) -> None:
    model, _ = twins
    batch = right_padded(UNEVEN)
    present = batch["attention_mask"].bool()
    with torch.no_grad():
        ours, theirs = (each(**batch, use_cache=False) for each in twins)
        torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours.logits[present], theirs.logits[present], rtol=1e-4, atol=1e-5)
        assert model.megacompile.plan.lengths
        del batch["labels"]
        states = [each(**batch, use_cache=False, output_hidden_states=True).hidden_states for each in twins]
        last = model.megacompile.last_hidden_state(batch)
    for one, two in zip(*states, strict=True):
        torch.testing.assert_close(one[present], two[present], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last[present], states[1][-1][present], rtol=1e-4, atol=1e-5)


def test_a_resumed_run_has_the_same_bits(twins: tuple[Any, Any], tmp_path: Path) -> None:
    def run(model: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            model.megacompile.train_step(right_padded(uneven(step), seed=step), optimizer)

    whole, first, second = (stream(twins[1]) for _ in range(3))
    optimizers = [megacompile.AdamW(model.parameters(), lr=1e-3) for model in (whole, first, second)]
    run(whole, optimizers[0], range(6))
    run(first, optimizers[1], range(3))
    with megacompile.CheckpointWriter(tmp_path, first, optimizers[1]) as writer:
        writer.save()
    megacompile.load_checkpoint(tmp_path, second, optimizers[2])
    run(second, optimizers[2], range(3, 6))
    for model in (whole, second):
        model.megacompile.synchronize()
    for one, two in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, two)
    for model in (whole, first, second):
        model.megacompile.close()


# ---------------------------------------------------------------- what is not grouped, and what is said
def test_rows_alike_rows_padded_on_the_left_and_short_batches_are_not_grouped(twins: tuple[Any, Any]) -> None:
    model, _ = twins
    left = {name: tensor.flip(1) for name, tensor in right_padded(UNEVEN).items()}
    for batch in (left, right_padded([30, 31, 32, 29]), right_padded([9, 3]), tiny_models.batch(rows=4, length=21)):
        assert not model.megacompile.compiled(batch).plan.lengths


def test_rows_that_are_padded_to_a_fixed_length_are_computed_in_a_shorter_one(twins: tuple[Any, Any]) -> None:
    model, _ = twins
    batch = {name: torch.nn.functional.pad(tensor, (0, 80), value=-100 if name == "labels" else 0)
             for name, tensor in right_padded([20, 19, 18, 21]).items()}
    losses = [each(**batch, use_cache=False).loss.item() for each in twins]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    spec = model.megacompile.compiled(batch).spec
    assert (spec.batch, spec.length, spec.group_rows) == (4, 24, ())


def test_a_target_in_the_padding_counts(twins: tuple[Any, Any]) -> None:
    batch = right_padded(UNEVEN)
    batch["labels"][3, 50] = 7
    losses = [each(**batch, use_cache=False).loss.item() for each in twins]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.nightly(held_by="tests/model/test_grouped_rows.py::test_grouped_batches_train_as_native_pytorch_trains_them")
def test_groups_are_explained_and_no_warning_says_that_padding_is_computed(twins: tuple[Any, Any]) -> None:
    model = stream(twins[1])
    batch = right_padded([64] * 4 + [8] * 20)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PaddingWarning)
        model(**batch).loss.backward()
    text = model.megacompile.explain(batch, hardware="h200")
    assert "rows: 24 x 64, grouped by length into 4 x 64, " in text
    assert "24 x 64 tokens a step (micro-batches of 4 x 64, " in text and "useful" not in text
    model.megacompile.close()


def test_rows_of_several_ranks_are_not_grouped(twins: tuple[Any, Any]) -> None:
    captures = engine.captures(twins[0])
    groupings = [Repacking(captures, True, any_length, alone).grouping
                 for alone in (True, False) for any_length in (True, False)]
    assert groupings == [Grouping.ANY_NUMBER, Grouping.FEW_NUMBERS, Grouping.NONE, Grouping.NONE]
    served, batch = captures.first, {name: tensor for name, tensor in right_padded(UNEVEN).items() if name != "attention_mask"}
    present = right_padded(UNEVEN)["attention_mask"].bool().numpy()
    layout = padding_for(served.captured, served.types, batch, present, LONGEST, Grouping.NONE)
    assert isinstance(layout, RightPadding) and layout.length == 64


@pytest.mark.nightly(held_by="tests/model/test_grouped_rows.py::test_steps_of_uneven_rows_train_as_native_pytorch")
def test_a_trainer_groups_rows_of_its_steps(twins: tuple[Any, Any], tmp_path: Path) -> None:
    weights = []
    for trainer, made in ((transformers.Trainer, build()), (Trainer, stream(build()))):
        rows = [{"input_ids": torch.arange(length) % tiny_models.VOCABULARY} for length in uneven(0, rows=60)]
        trained.run(trainer, tmp_path, made, given=dict(train_dataset=rows), max_steps=5, per_device_train_batch_size=12)
        weights.append([parameter.detach().clone() for parameter in made.parameters()])
    assert made.megacompile.plan.lengths
    for one, two in zip(*weights, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    made.megacompile.close()
