"""Kinds of layers on CUDA, in bf16 and compiled, beside native PyTorch in float32: experts, windows, sinks, capped scores."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import megacompile

pytestmark = pytest.mark.gpu

SIZES = dict(vocab_size=512, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, head_dim=64,
             num_key_value_heads=2, max_position_embeddings=512, pad_token_id=None, bos_token_id=None, eos_token_id=None)
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=32),
    "mistral": dict(sliding_window=32),
    "gemma2": dict(sliding_window=32, query_pre_attn_scalar=64),
    "gemma3_text": dict(sliding_window=32, query_pre_attn_scalar=64),
}


@pytest.mark.parametrize(("kind", "pieces"), [*((kind, None) for kind in KINDS), ("qwen3_moe", 3), ("gpt_oss", 2)])
def test_a_kind_trains_as_close_to_float32_as_native_bf16_does(kind: str, pieces: int | None) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, **KINDS[kind])
    half: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    model = megacompile.stream(copy.deepcopy(half), micro_batch_size=2, expert_pieces=pieces)
    exact = copy.deepcopy(half).float().cuda()
    half.cuda()
    ids = torch.randint(0, 512, (4, 128)).cuda()
    gradients = []
    for each in (exact, half, model):
        loss = each(input_ids=ids, labels=ids, **({} if each is model else {"use_cache": False})).loss
        loss.backward()
        gradients.append({name: p.grad.float().cpu() for name, p in each.named_parameters() if p.grad is not None})
    true, native, ours = gradients
    assert ours.keys() == true.keys()

    def error(found: dict[str, torch.Tensor]) -> float:
        return sum(float((found[n] - g).norm() / (g.norm() + 1e-12)) ** 2 for n, g in true.items()) ** 0.5

    assert error(ours) <= 1.3 * error(native), f"ours {error(ours):.3e}, native bf16 {error(native):.3e}"
    model.megacompile.close()
