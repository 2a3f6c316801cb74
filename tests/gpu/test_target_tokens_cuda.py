"""Prompts and padding are left out of the head on CUDA too, compiled, and results are native PyTorch's in float32."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import assert_same_gradients, right_padded
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

import megacompile
from megacompile.frontend.ops import linear_cross_entropy as op
from megacompile.ir.token_loop import TokenLoop
from megacompile.losses import IGNORED, log_probabilities_and_entropies, next_tokens

pytestmark = pytest.mark.gpu
LENGTHS = [1500, 700, 1100, 900, 2000, 300, 1700, 800]


def build() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(Qwen2Config(
        vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2)).train()


def conversations(seed: int) -> dict[str, Tensor]:
    """Padded rows of which all but the last 200 tokens are prompts."""
    batch = right_padded(LENGTHS, seed)
    places = torch.arange(max(LENGTHS))
    return batch | {"labels": batch["labels"].masked_fill(places < torch.tensor(LENGTHS)[:, None] - 200, IGNORED)}


@pytest.mark.parametrize("repack", [None, False], ids=["packed", "padded"])
def test_a_loss_over_completions(monkeypatch: pytest.MonkeyPatch, repack: bool | None) -> None:
    computed: list[int] = []
    real = op._fused_chunk_gradient
    monkeypatch.setattr(op, "_fused_chunk_gradient", lambda rows, *more: (computed.append(rows), real(rows, *more))[1])
    native = build()
    model = megacompile.stream(copy.deepcopy(native), **({} if repack is None else {"repack": repack}))
    native.cuda()
    for seed in range(3):
        batch = {name: value.cuda() for name, value in conversations(seed).items()}
        loss, expected = model(**batch).loss, native(**batch, use_cache=False).loss
        torch.testing.assert_close(loss.detach().cpu(), expected.detach().cpu(), rtol=1e-3, atol=1e-3)
        loss.backward()
        expected.backward()
        assert_same_gradients(model, native, 1e-3)  # float32 products by TensorFloat32
        for each in (model, native):
            each.zero_grad()
    micro_batches = len(model.megacompile.plan.micro_batches)
    assert 8 * 200 <= sum(computed) / 3 <= 8 * 200 + 128 * micro_batches < 0.3 * sum(LENGTHS)
    model.megacompile.close()


def test_a_function_of_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    real = TokenLoop._run
    monkeypatch.setattr(TokenLoop, "_run", lambda loop, batch, length, start, count, *more: (
        computed.append(batch * count), real(loop, batch, length, start, count, *more))[1])
    native = build()
    model = megacompile.stream(copy.deepcopy(native))
    native.cuda()
    batch = {name: value.cuda() for name, value in conversations(0).items()}
    targets = next_tokens(batch.pop("labels"))
    found = model.megacompile.per_token(log_probabilities_and_entropies, batch, targets=targets)
    forward = sum(computed)
    logits = native(**batch, use_cache=False).logits
    expected = log_probabilities_and_entropies(logits.flatten(0, 1), targets.flatten())
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs.view(targets.shape), rtol=1e-2, atol=1e-2)
    for values in (found, [each.view(targets.shape) for each in expected]):
        sum(((value * 0.1).exp() * (targets != IGNORED)).sum() for value in values).backward()
    assert_same_gradients(model, native, 2e-3)
    assert 8 * 199 <= forward < 0.6 * sum(LENGTHS) and sum(computed) == 2 * forward
    model.megacompile.close()
