"""Short uneven rows, and a model whose batches are never packed, so that these rows are grouped by length."""
from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import tiny_models
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, JambaConfig

import megacompile
from megacompile.inputs import packed_layout, rounded_lengths
from megacompile.inputs.rounded_lengths import rounded
from megacompile.ir.plan import FULL_TOKENS

#: The usual length of rows.
LONGEST = 64
#: What a group costs in these tests, in tokens: their rows are short.
COST = 16
UNEVEN = [5, 60, 9, 3, 30, 8, 7, 12, 2, 15]


def lower_the_cost(monkeypatch: Any) -> None:
    """Lets rows as short as these be grouped."""
    for module in (packed_layout, rounded_lengths):
        monkeypatch.setattr(module, "TOKENS_OF_A_GROUP", COST)


def build() -> Any:
    """A model with selective scans, which are not told where sequences begin, so that its batches are never packed."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(JambaConfig(
        vocab_size=tiny_models.VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0, attn_layer_period=3, attn_layer_offset=1, num_experts=1, mamba_d_state=4,
        mamba_dt_rank=4, use_mamba_kernels=False)).train()


def stream(native: Any, **options: Any) -> Any:
    return megacompile.stream(copy.deepcopy(native), device="cpu", repack=LONGEST, **options)


def twins() -> Iterator[tuple[Any, Any]]:
    """The model, streamed and native. A fixture of modules."""
    native = build()
    model = stream(native)
    yield model, native
    model.megacompile.close()


def assert_same_step(twins: tuple[Any, Any], batch: dict[str, Tensor]) -> None:
    """The losses and gradients of both models are equal. Leaves no gradients."""
    losses = [each(**batch, use_cache=False).loss for each in twins]
    torch.testing.assert_close(losses[0].detach(), losses[1].detach(), rtol=1e-6, atol=1e-6)
    for loss in losses:
        loss.backward()
    tiny_models.assert_same_gradients(*twins)
    for each in twins:
        each.zero_grad()


def uneven(seed: int, rows: int = 12, longest: int = LONGEST) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.empty(rows).log_normal_(2.0, 0.8, generator=generator).clamp(2, longest).long().tolist()
    return [longest, *lengths[1:]]


def widths_of(lengths: list[int], usual: int) -> dict[int, int]:
    return {width: max(1, FULL_TOKENS // width) for width in {rounded(each, usual) for each in lengths}}
