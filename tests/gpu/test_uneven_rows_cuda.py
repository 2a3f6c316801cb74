"""Rows of uneven length that are not packed, compiled and grouped by length on CUDA, against native PyTorch."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import assert_same_gradients, right_padded, step_of_both
from transformers import AutoModelForCausalLM, JambaConfig

import megacompile

pytestmark = pytest.mark.gpu
#: Lengths as those of instructions. Groups of them save more tokens than they cost.
LENGTHS = ([60, 180, 1500, 90, 240, 410, 120, 33, 700, 150, 200, 75], [2000, 16, 300, 190, 95, 140, 510, 220, 61, 130, 990, 84])


def build(dtype: torch.dtype) -> Any:
    """A model with selective scans, which are not told where sequences begin, so that its rows are never packed."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(JambaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, attn_layer_period=4, attn_layer_offset=1, num_experts=1, mamba_d_state=4,
        mamba_dt_rank=8, use_mamba_kernels=False), dtype=dtype).train()


def on_cuda(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cuda() for name, value in batch.items()}


def test_gradients_of_grouped_rows_are_native_pytorchs() -> None:
    native = build(torch.float32)
    model = megacompile.stream(copy.deepcopy(native))
    native.cuda()
    for seed, lengths in enumerate(LENGTHS):
        batch = on_cuda(right_padded(lengths, seed))
        losses = [each(**batch, use_cache=False).loss for each in (model, native)]
        torch.testing.assert_close(losses[0].detach().cpu(), losses[1].detach().cpu(), rtol=1e-3, atol=1e-3)
        for loss in losses:
            loss.backward()
        plan = model.megacompile.plan
        assert len(set(plan.lengths)) > 1 and plan.tokens < 0.6 * plan.batch * plan.length
        assert_same_gradients(model, native, 1e-3)  # float32 products by TensorFloat32
        for each in (model, native):
            each.zero_grad()
    assert model.megacompile.stats["compiled_variants"] > 0
    model.megacompile.close()


@pytest.mark.parametrize("whole", [False, True], ids=["loop", "whole steps"])
def test_steps_over_grouped_rows_in_bfloat16_train_as_float32_does(whole: bool) -> None:
    native = build(torch.bfloat16)
    model = megacompile.stream(copy.deepcopy(native))
    native.float().cuda()
    optimizers = (megacompile.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0),
                  torch.optim.AdamW(native.parameters(), lr=1e-3))
    for step in range(8):
        batch = on_cuda(right_padded(LENGTHS[step % 2], seed=step))
        loss, expected = step_of_both(model, native, optimizers, batch, whole,
                                      lambda: torch.nn.utils.clip_grad_norm_(native.parameters(), 1.0))
        assert abs(float(loss) - float(expected)) < 2e-2
    model.megacompile.close()
