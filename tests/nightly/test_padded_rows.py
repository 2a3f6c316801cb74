"""Families train on padded rows of random lengths as native PyTorch does, in float32: packed, or padded where they must be."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import verdicts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_configs import FIRST_PLAIN_TOKEN, VOCABULARY
from torch import Tensor

import megacompile

#: The last two are not packed: their recurrences are not told where sequences begin.
FAMILIES = ("llama", "gemma3_text", "qwen3", "gpt_neox", "olmo2", "gpt2", "cohere2", "falcon", "lfm2", "qwen3_next", "mamba2",
            "jamba")
LONGEST = 24


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Tensor]:
    """1 to 17 rows of random lengths with padding on one side, int64 [rows, longest]. Some predict a row's first token from
    padding on the left."""
    lengths = torch.tensor([*draw(st.lists(st.integers(1, LONGEST), min_size=0, max_size=16)), 4])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    ids = torch.randint(FIRST_PLAIN_TOKEN, VOCABULARY, (len(lengths), int(lengths.max())), generator=generator)
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    if draw(st.booleans()):
        mask = mask.flip(1)
    labels = ids.masked_fill(mask == 0, -100)
    if draw(st.booleans()):
        labels[torch.arange(len(lengths)), mask.argmax(1)] = -100
    return {"input_ids": ids * mask, "labels": labels, "attention_mask": mask}


@pytest.mark.parametrize(("family", "length"), [("axk2", 29), ("deepseek_v3", 128)])
def test_rows_keep_their_length_if_the_model_chooses_tokens_and_not_if_it_chooses_experts(family: str, length: int) -> None:
    """Among tokens with the same score, the choice may depend on the length of the row."""
    model = megacompile.stream(verdicts._build(family), device="cpu")
    batch = verdicts.padded_batch()
    del batch["labels"]  # such rows are not packed
    assert model.megacompile.compiled(batch).spec.length == length
    model.megacompile.close()


@pytest.mark.parametrize("family", [*FAMILIES[:2], *(pytest.param(each, marks=pytest.mark.nightly) for each in FAMILIES[2:])])
def test_padded_rows_have_the_loss_and_gradients_of_native_pytorch(family: str) -> None:
    torch.manual_seed(0)
    native: Any = verdicts._build(family)
    model = megacompile.stream(copy.deepcopy(native), device="cpu")

    @settings(max_examples=8, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    @given(batch=batches())
    def check(batch: dict[str, Tensor]) -> None:
        ours, theirs = (verdicts._loss_and_gradients(each, batch) for each in (model, native))
        for each in (model, native):
            each.zero_grad()
        assert float(ours[0].detach()) == pytest.approx(float(theirs[0].detach()), rel=1e-6)
        assert verdicts._difference(native, batch, ours, theirs) == ("exact", "")

    check()
    model.megacompile.close()
