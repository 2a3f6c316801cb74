"""Decoders whose tokens see later ones, by a config option: exact, and padding is never left out for them."""
from __future__ import annotations

import copy
from typing import Any

import engine
import pytest
import torch
from tiny_models import assert_same_gradients, batch

import megacompile

SIZES = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1, head_dim=8)


def llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**{**SIZES, "num_hidden_layers": 1}, is_causal=False)


def gemma() -> Any:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(**SIZES, use_bidirectional_attention=True, sliding_window=5,
                            layer_types=["sliding_attention", "full_attention"])


@pytest.mark.nightly(held_by=(
    "tests/model/test_packing.py::test_loss_and_gradients_are_native_pytorchs",
    "tests/model/test_packing.py::test_padding_on_the_right_is_seen_where_its_labels_count"))
@pytest.mark.parametrize(("config", "fused"), [(llama, False), (gemma, True)])
def test_a_model_whose_tokens_see_later_ones_trains_exactly_with_padding_and_without(config: Any, fused: bool) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    native = AutoModelForCausalLM.from_config(config()).train()
    model = megacompile.stream(copy.deepcopy(native), device="cpu")
    captured = engine.captured(model)
    assert not captured.causal and captured.fused_attention is fused
    plain = batch(1, rows=3, length=11)
    present = torch.ones_like(plain["labels"])
    present[1, 7:] = 0
    padded = {**plain, "labels": plain["labels"].masked_fill(present == 0, -100), "attention_mask": present}
    for given in (plain, padded):
        native.zero_grad()
        model.zero_grad()
        loss, ours = native(**given).loss, model(**given).loss
        loss.backward()
        ours.backward()
        torch.testing.assert_close(ours, loss, rtol=1e-6, atol=0)
        assert_same_gradients(model, native)
    model.megacompile.close()
