"""Batches joined into one: which values pad which inputs, and which batches cannot be joined."""
from __future__ import annotations

import pytest
import torch

from megacompile.trainer import join

SHORT = {"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.tensor([[1, 1]]), "labels": torch.tensor([[1, 2]])}
LONG = {"input_ids": torch.tensor([[3, 4, 5], [6, 7, 0]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        "labels": torch.tensor([[3, 4, 5], [6, 7, -100]])}


def test_shorter_batches_are_padded_with_what_no_loss_counts() -> None:
    joined = join([SHORT, LONG], labels=("labels",), causal=True)
    assert joined is not None
    assert {key: value.tolist() for key, value in joined.items()} == {
        "input_ids": [[1, 2, 0], [3, 4, 5], [6, 7, 0]],
        "attention_mask": [[1, 1, 0], [1, 1, 1], [1, 1, 0]],
        "labels": [[1, 2, -100], [3, 4, 5], [6, 7, -100]]}


def test_further_dimensions_are_not_padded() -> None:
    codes = [{"codes": torch.ones(rows, length, 4, dtype=torch.long)} for rows, length in ((1, 2), (2, 3))]
    joined = join(codes, labels=(), causal=True)
    assert joined is not None and joined["codes"].shape == (3, 3, 4) and joined["codes"].sum() == (2 + 6) * 4


def test_a_single_batch_may_hold_anything() -> None:
    assert join([{**SHORT, "use_cache": False}], labels=("labels",), causal=True) == {**SHORT, "use_cache": False}


@pytest.mark.parametrize("other", [
    {"input_ids": LONG["input_ids"]},
    {**LONG, "attention_mask": None},
    {**LONG, "input_ids": torch.rand(2, 3)},
    {**LONG, "input_ids": torch.ones(2, 3, 4, dtype=torch.long)},
    {**LONG, "input_ids": LONG["input_ids"].int()},
    {**LONG, "labels": torch.tensor([0, 1])},
])
def test_values_that_differ_or_are_not_sequences_are_not_joined(other: dict[str, torch.Tensor]) -> None:
    assert join([SHORT, other], labels=("labels",), causal=True) is None


def test_nothing_is_padded_where_a_token_would_see_it() -> None:
    def without_mask(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {key: value for key, value in batch.items() if key != "attention_mask"}

    of_two_lengths = [without_mask(SHORT), without_mask(LONG)]
    assert join(of_two_lengths, labels=("labels",), causal=True) is not None
    assert join(of_two_lengths, labels=("labels",), causal=False) is None
    assert join([without_mask(LONG)] * 2, labels=("labels",), causal=False) is not None
    assert join([SHORT, LONG], labels=("labels",), causal=False) is not None  # the mask says what is padding
