"""Kinds of layers compiled on CUDA in bf16, against native float32 and bf16: experts, windows, sinks, soft-caps, images."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    SiglipVisionConfig,
)

import megacompile

pytestmark = pytest.mark.gpu

SIZES = dict(vocab_size=512, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, head_dim=64,
             num_key_value_heads=2, max_position_embeddings=512, pad_token_id=None, bos_token_id=None, eos_token_id=None)
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=32),
    "mistral": dict(sliding_window=32),
    "phi": {},  # LayerNorm
    "gpt2": dict(n_embd=256, n_layer=2, n_head=4, n_positions=512),
    "gemma2": dict(sliding_window=32, query_pre_attn_scalar=64),
    "gemma3_text": dict(sliding_window=32, query_pre_attn_scalar=64),
}


@pytest.mark.parametrize(("kind", "pieces"), [*((kind, None) for kind in KINDS), ("qwen3_moe", 3), ("gpt_oss", 2)])
def test_a_kind_trains_as_close_to_float32_as_native_bf16_does(kind: str, pieces: int | None) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, **KINDS[kind])
    ids = torch.randint(0, 512, (4, 128))
    assert_close(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), dict(input_ids=ids, labels=ids),
                 expert_pieces=pieces)


def test_images_train_as_close_to_float32_as_native_bf16_does() -> None:
    """Gemma-3: the tokens of an image see each other, in full layers and in those with a window, by a mask of every pair."""
    torch.manual_seed(0)
    size, image, patches = 28, 511, 4
    vision = SiglipVisionConfig(hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
                                image_size=size, patch_size=7)
    text = Gemma3TextConfig(**SIZES, **KINDS["gemma3_text"], layer_types=["sliding_attention", "full_attention"])
    config = Gemma3Config(vision_config=vision, text_config=text, image_token_id=image, mm_tokens_per_image=patches)
    ids = torch.randint(0, image, (4, 128))
    for row, start in enumerate((3, 60, 100, 7)):
        ids[row, start:start + patches] = image
    batch = dict(input_ids=ids, labels=ids.masked_fill(ids == image, -100), token_type_ids=(ids == image).long(),
                 pixel_values=torch.randn(4, 3, size, size, dtype=torch.bfloat16))
    half: Any = Gemma3ForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    half.model.vision_tower.requires_grad_(False)  # keys' biases have gradients of nothing but rounding
    assert_close(half, batch, example=batch)


def assert_close(half: Any, batch: dict[str, torch.Tensor], **options: Any) -> None:
    """All gradients, together, no further from those of native float32 than native bf16's are (by a third)."""
    model = megacompile.stream(copy.deepcopy(half.train()), micro_batch_size=2, **options)
    exact = copy.deepcopy(half).float().cuda()
    half.cuda()
    batch = {name: x.cuda() for name, x in batch.items()}
    gradients = []
    for each in (exact, half, model):
        given = {name: x.float() if each is exact and x.is_floating_point() else x for name, x in batch.items()}
        loss = each(**given, **({} if each is model else {"use_cache": False})).loss
        loss.backward()
        gradients.append({name: p.grad.float().cpu() for name, p in each.named_parameters() if p.grad is not None})
    true, native, ours = gradients
    assert ours.keys() == true.keys()

    def error(found: dict[str, torch.Tensor]) -> float:
        return sum(float((found[n] - g).norm() / (g.norm() + 1e-12)) ** 2 for n, g in true.items()) ** 0.5

    assert error(ours) <= 1.3 * error(native), f"ours {error(ours):.3e}, native bf16 {error(native):.3e}"
    model.megacompile.close()
