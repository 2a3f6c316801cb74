"""Losses that users compute from a model's values train through compiled kernels."""
from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch
from torch import Tensor

import megacompile
from megacompile.losses import IGNORED, log_probabilities, log_probabilities_and_entropies, next_tokens

ROWS, LENGTH = 4, 24


def batch(lengths: list[int]) -> tuple[dict[str, Tensor], Tensor]:
    """Rows padded on the right, and their targets."""
    padded = tiny_models.right_padded(lengths, seed=11)
    return padded, next_tokens(padded.pop("labels"))


def kernels(model: Any) -> int:
    """Number of graphs that inductor has compiled for a model, now or in an earlier process."""
    stats = model.megacompile.stats
    return int(stats["compiled"] + stats["compiled_from_cache"])


def loss_of(log_probs: Tensor, entropies: Tensor) -> Tensor:
    return -(log_probs * torch.linspace(0.5, 2, log_probs.numel()).view_as(log_probs)).sum() / 50 - 0.01 * entropies.sum()


@pytest.mark.parametrize("lengths", [
    pytest.param([LENGTH] * ROWS, marks=pytest.mark.nightly), [LENGTH, 7, 5, 9]], ids=["one length", "packed"])
def test_values_of_tokens_are_compiled_and_train_as_native_pytorch(lengths: list[int]) -> None:
    given, targets = batch(lengths)
    native = tiny_models.build(num_hidden_layers=1)
    model = megacompile.stream(tiny_models.build(num_hidden_layers=1), device="cpu", compile=True, repack=64)
    try:
        values = model.megacompile.per_token(log_probabilities_and_entropies, given, targets=targets)
        loss = loss_of(*values)
        loss.backward()
        assert kernels(model) > 0
        logits = native(**given).logits
        distribution = torch.distributions.Categorical(logits=logits.double())
        known = targets != IGNORED
        expected = loss_of(distribution.log_prob(targets.clamp(min=0)).where(known, 0), distribution.entropy().where(known, 0))
        expected.backward()
        torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
        for (name, parameter), ours in zip(native.named_parameters(), model.parameters(), strict=True):
            assert parameter.grad is not None and ours.grad is not None, name
            assert (ours.grad - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name
    finally:
        model.megacompile.close()


@pytest.mark.nightly(
    held_by="tests/model/test_compiled_values.py::test_values_of_tokens_are_compiled_and_train_as_native_pytorch")
def test_logits_of_one_more_token_each_time_compile_nothing() -> None:
    model: Any = megacompile.stream(tiny_models.build(num_hidden_layers=1), device="cpu", compile=True, repack=False)
    try:
        with torch.no_grad():
            for length in (5, 6):
                model(input_ids=tiny_models.batch(3, rows=1, length=length)["input_ids"], use_cache=False)
            assert kernels(model) == 0
            given, targets = batch([LENGTH] * ROWS)
            model.megacompile.per_token(log_probabilities, given, targets=targets)
        assert kernels(model) > 0
    finally:
        model.megacompile.close()
