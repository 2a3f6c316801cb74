"""What `model.megacompile.stats` counts of tokens, plans and kernels."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from torch import Tensor

import megacompile
from megacompile.inputs.token_counts import TokenCounts, TokenRate
from megacompile.runtime.kernels import Batch


def padded(*lengths: int, mask: bool = True) -> dict[str, Tensor]:
    ids = tiny_models.batch(7, rows=len(lengths), length=max(lengths))["input_ids"]
    present = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    batch = {"input_ids": ids, "labels": ids.masked_fill(~present, -100)}
    return {**batch, "attention_mask": present.long()} if mask else batch


def counted(model: Any) -> tuple[int, int]:
    stats = model.megacompile.stats
    return stats["useful_tokens"], stats["computed_tokens"]


def test_no_token_was_counted_before_the_first_step() -> None:
    assert TokenCounts().stats() == dict(useful_tokens=0, computed_tokens=0, packing_efficiency=1.0, step_useful_tokens=0,
                                         step_computed_tokens=0, step_packing_efficiency=1.0)


@pytest.mark.parametrize("mask", [True, False])
def test_useful_tokens_are_those_that_are_no_padding_and_computed_ones_fill_rows(mask: bool, model: Any) -> None:
    optimizer, (useful, computed) = megacompile.AdamW(model.parameters()), counted(model)
    model.megacompile.train_step(padded(20, 4, 2, mask=mask), optimizer)
    assert counted(model) == (useful + 26, computed + 64)
    model.megacompile.train_step(padded(30, 28, mask=mask), optimizer)
    stats = model.megacompile.stats
    assert counted(model) == (useful + 84, computed + 128)
    assert (stats["step_useful_tokens"], stats["step_computed_tokens"]) == (58, 64)
    assert stats["step_packing_efficiency"] == 58 / 64
    assert stats["packing_efficiency"] == stats["useful_tokens"] / stats["computed_tokens"]


def test_a_step_of_a_loop_has_the_tokens_of_all_its_backwards_and_of_nothing_else(model: Any) -> None:
    optimizer, (useful, computed) = megacompile.AdamW(model.parameters()), counted(model)
    with torch.no_grad():
        model(**padded(9, 3))
    del model(**padded(9, 4)).loss  # no backward
    for lengths in ((20, 4), (8, 8)):
        model(**padded(*lengths)).loss.backward()
        assert counted(model) == (useful, computed), "the step is not over"
    optimizer.step()
    assert counted(model) == (useful + 40, computed + 64 + 16)
    assert model.megacompile.stats["step_useful_tokens"] == 40


def test_rows_that_are_not_packed_compute_their_padding() -> None:
    model = megacompile.stream(tiny_models.build(), device="cpu", repack=False)
    try:
        model.megacompile.train_step(padded(20, 4, 2), megacompile.AdamW(model.parameters()))
        assert counted(model) == (26, 60)
    finally:
        model.megacompile.close()


def answered(stats: dict[str, int]) -> int:
    """Plans that were searched, or found in the cache."""
    return stats["plan_searches"] + stats["plans_from_cache"]


def test_one_plan_is_searched_for_packed_rows_of_one_length_and_their_kernels_have_few_sizes(model: Any) -> None:
    optimizer, before = megacompile.AdamW(model.parameters()), model.megacompile.stats
    for longest in range(33, 60, 2):
        model.megacompile.train_step(padded(longest, 3, 40), optimizer)
    after = model.megacompile.stats
    assert answered(after) - answered(before) <= 1
    assert after["micro_batch_shapes"] - before["micro_batch_shapes"] <= 2
    model.megacompile.train_step(padded(17, 17), optimizer)  # nothing to pack
    assert answered(model.megacompile.stats) == answered(after) + 1
    assert model.megacompile.stats["micro_batch_shapes"] == after["micro_batch_shapes"] + 1


def test_a_rate_is_of_the_steps_since_the_last_one() -> None:
    times, counts = iter([9.0, 10.0, 12.0, 13.0]), TokenCounts()
    rate = TokenRate(clock=lambda: next(times))
    assert rate.since(counts) == {}, "it has not begun"
    rate.end()
    rate.begin(counts)
    counts.end_step([Batch([], {}, useful_tokens=26, computed_tokens=60), Batch([], {}, useful_tokens=4, computed_tokens=4)])
    rate.begin(counts)
    assert rate.since(counts) == {"tokens_per_second": 15.0, "padding_share": 1 - 30 / 64}
    assert rate.since(counts) == {}, "no step has ended"


@pytest.mark.nightly(held_by="tests/model/test_repacking.py::test_a_predicted_rate_does_not_count_padding")
def test_trainer_logs_tokens_a_second_without_padding_and_the_share_of_padding(model: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    import trained

    from megacompile.trainer import Trainer
    logged = [entry for entry in trained.run(Trainer, tmp_path, model).state.log_history if "loss" in entry]
    stats = model.megacompile.stats
    assert len(logged) == 4 and all(entry["tokens_per_second"] > 0 for entry in logged)
    assert logged[-1]["padding_share"] == pytest.approx(1 - stats["step_packing_efficiency"])
    assert 0 < logged[-1]["padding_share"] < 0.5
