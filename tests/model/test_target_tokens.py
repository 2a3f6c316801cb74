"""The head computes tokens that have a target alone, where enough of them have none."""
from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import megacompile
from megacompile.frontend.ops import linear_cross_entropy as op
from megacompile.frontend.templates import heads
from megacompile.ir.target_tokens import known_target_tokens, target_tokens
from megacompile.ir.token_loop import TokenLoop
from megacompile.losses import (
    IGNORED,
    leaves_out_ignored,
    log_probabilities,
    log_probabilities_and_entropies,
    next_tokens,
    zero_where_ignored,
)

WIDTH, VOCABULARY, CHUNK = 8, 11, 256


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each chunk of a head has."""
    found: list[int] = []
    real = op._chunk_gradient

    def counted(scores: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        found.append(scores.shape[0])
        return real(scores, *arguments)

    monkeypatch.setattr(op, "_chunk_gradient", counted)
    return found


def results(targets: Tensor, biased: bool) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    hidden = torch.randn(len(targets), WIDTH, dtype=torch.float64)
    weight, bias = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64), torch.randn(VOCABULARY, dtype=torch.float64)
    return tuple(op.linear_cross_entropy(hidden, weight, bias if biased else None, targets, torch.tensor(7.0), IGNORED, 2.0,
                                         5.0, CHUNK, True))


@settings(max_examples=25)
@given(st.integers(1, 700), st.floats(0, 1), st.booleans(), st.integers(0, 2**31))
def test_results_are_those_of_all_tokens(tokens: int, share: float, biased: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(VOCABULARY, (tokens,), generator=generator)
    targets = targets.masked_fill(torch.rand(tokens, generator=generator) < share, IGNORED)
    expected = results(targets, biased)
    with target_tokens(int((targets != IGNORED).sum())):
        found = results(targets, biased)
    assert known_target_tokens() is None
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)  # sums over tokens are FP32


@pytest.mark.parametrize(("with_targets", "chunks"), [
    (600, [256, 256, 88]), (540, [256, 256, 88]), (500, [256, 256]), (300, [256, 128]), (128, [128]), (1, [128]), (0, [])])
def test_chunks_hold_tokens_with_targets_and_few_others(with_targets: int, chunks: list[int], computed: list[int]) -> None:
    targets = torch.zeros(600, dtype=torch.int64).index_fill(0, torch.randperm(600)[with_targets:], IGNORED)
    with target_tokens(with_targets):
        results(targets, False)
    assert computed == chunks


def conversations(rows: int, length: int, seed: int) -> dict[str, Tensor]:
    """Rows of which two thirds are prompts, and one has no target."""
    batch = tiny_models.batch(seed, rows=rows, length=length)
    labels = batch["labels"].masked_fill(torch.arange(length) < 2 * length // 3, IGNORED)
    labels[0] = IGNORED
    return batch | {"labels": labels}


@pytest.mark.sample(3)
@pytest.mark.parametrize("options", [dict(micro_batch_size=1), dict(micro_batch_size=2, waves=2), dict()], ids=str)
@pytest.mark.parametrize("whole", [False, True], ids=["loop", "whole steps"])
def test_prompts_are_left_out_and_training_is_native_pytorchs(options: dict[str, Any], whole: bool,
                                                              computed: list[int]) -> None:
    native = tiny_models.build()
    model = megacompile.stream(copy.deepcopy(native), device="cpu", **options)
    optimizers = megacompile.AdamW(model.parameters(), lr=1e-2), torch.optim.AdamW(native.parameters(), lr=1e-2)
    for seed in range(3):
        losses = tiny_models.step_of_both(model, native, optimizers, conversations(4, 300, seed), whole,
                                          lambda: whole or tiny_models.assert_same_gradients(model, native))
        torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
    micro_batches = len(model.megacompile.plan.micro_batches)
    assert 3 * 3 * 100 <= sum(computed) <= 3 * (3 * 100 + micro_batches * 128) < 3 * 4 * 300
    model.megacompile.close()


class SummedLoss(nn.Module):
    """Its loss is divided by the number of rows, which is not the number of targets."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_models.build()
        self.config = self.inner.config

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.inner(input_ids=input_ids, use_cache=False).logits
        total = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
        return {"loss": total / (labels != IGNORED).any(1).sum(), "logits": logits}


@pytest.mark.nightly(held_by=(
    "tests/model/test_target_tokens.py::test_results_are_those_of_all_tokens",
    "tests/model/test_target_tokens.py::test_prompts_are_left_out_and_training_is_native_pytorchs"))
def test_a_loss_that_is_not_divided_by_its_targets_computes_all_tokens(computed: list[int]) -> None:
    native = SummedLoss()
    model = megacompile.stream(copy.deepcopy(native), device="cpu", micro_batch_size=4)
    batch = conversations(4, 300, 0)
    loss, expected = model(**batch)["loss"], native(**batch)["loss"]
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-6, atol=1e-6)
    loss.backward()
    expected.backward()
    tiny_models.assert_same_gradients(model, native)
    assert sum(computed) == 4 * 300
    model.megacompile.close()


# ---------------------------------------------------------------- functions of tokens
@pytest.fixture
def in_loops(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each chunk of a loop over tokens has. Chunks of heads are small."""
    found: list[int] = []
    real = TokenLoop._run

    def counted(loop: TokenLoop, batch: int, length: int, start: int, count: int, *others: Any) -> list[Tensor]:
        found.append(batch * count)
        return real(loop, batch, length, start, count, *others)

    monkeypatch.setattr(TokenLoop, "_run", counted)
    monkeypatch.setattr(heads, "CHUNK_TOKENS", 64)
    return found


def completions(rows: int, length: int) -> tuple[dict[str, Tensor], Tensor]:
    """Padded rows, and the targets of their last thirds; the first row has none."""
    batch = tiny_models.right_padded([length - 7 * row for row in range(rows)])
    targets = next_tokens(batch["labels"].masked_fill(torch.arange(length) < 2 * length // 3, IGNORED))
    targets[0] = IGNORED
    return {name: batch[name] for name in ("input_ids", "attention_mask")}, targets


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", [dict(micro_batch_size=1), dict(micro_batch_size=3), dict(repack=128), dict(repack=False)],
                         ids=str)
@pytest.mark.parametrize("made", [log_probabilities, log_probabilities_and_entropies])
def test_functions_leave_out_prompts_and_have_native_pytorchs_gradients(
        options: dict[str, Any], made: Any, in_loops: list[int]) -> None:
    @zero_where_ignored
    def function(logits: Tensor, targets: Tensor) -> Any:
        return made(logits, targets)

    native = tiny_models.build()
    model = megacompile.stream(copy.deepcopy(native), device="cpu", **options)
    batch, targets = completions(6, 120)
    found = model.megacompile.per_token(function, batch, targets=targets)
    logits = native(**batch, use_cache=False).logits
    expected = made(logits.flatten(0, 1), targets.flatten())
    pairs = [(found, expected)] if isinstance(found, Tensor) else list(zip(found, expected, strict=True))
    generator = torch.Generator().manual_seed(0)
    of_both = torch.zeros(()), torch.zeros(())
    for ours, theirs in pairs:
        theirs = theirs.view(targets.shape)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        weights = torch.rand(targets.shape, generator=generator)
        of_both = of_both[0] + (ours * weights).sum(), of_both[1] + (theirs * weights).sum()
    forward = sum(in_loops)
    for total in of_both:
        total.backward()
    tiny_models.assert_same_gradients(model, native)
    wanted = int((targets != IGNORED).sum())
    micro_batches = len(model.megacompile.plan.micro_batches)
    assert wanted <= forward <= wanted + micro_batches * 64 < 0.6 * batch["attention_mask"].sum()
    assert sum(in_loops) == 2 * forward
    model.megacompile.close()


def test_what_partial_wraps_is_declared_and_so_may_be_the_partial_itself() -> None:
    plain = functools.partial(lambda logits, targets, scale: logits.sum(-1) * scale, scale=2.0)
    assert leaves_out_ignored(functools.partial(log_probabilities)) and not leaves_out_ignored(plain)
    assert leaves_out_ignored(zero_where_ignored(plain))


def test_other_functions_get_all_tokens(in_loops: list[int]) -> None:
    """Those with values where the target is ignored."""
    def function(logits: Tensor, targets: Tensor) -> Tensor:
        return log_probabilities(logits, targets) + logits.float().mean(-1)

    native = tiny_models.build()
    model = megacompile.stream(copy.deepcopy(native), device="cpu", repack=False)
    batch, targets = completions(6, 120)
    found = model.megacompile.per_token(function, batch, targets=targets)
    expected = function(native(**batch, use_cache=False).logits.flatten(0, 1), targets.flatten()).view(targets.shape)
    seen = batch["attention_mask"] > 0
    torch.testing.assert_close(found[seen], expected[seen], rtol=1e-5, atol=1e-6)
    assert sum(in_loops) >= seen.sum()
    model.megacompile.close()
