"""Tiny models of the families that must train exactly, and one written by hand."""
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 96

_SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
_GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 4, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 8},
    "gpt2": {},
    "gpt_neox": {"attention_dropout": 0.0, "hidden_dropout": 0.0},
    "phi3": {},
    "olmo2": {},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 8},
    "hand_written": {},
    "tied": {"tie_word_embeddings": True},  # a qwen2
}


class HandWrittenLayer(nn.Module):
    """Pre-norm, fused qkv, an in-place activation, and a scale that only every second layer has."""

    def __init__(self, width: int, scaled: bool) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.7)) if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        hidden = self.up(x)
        F.relu_(hidden)  # its result is unread: dead to a dead-code elimination that knows no mutation
        return x + self.down(hidden) * (1.0 if self.scale is None else self.scale)


class HandWritten(nn.Module):
    """No transformers anywhere; the head is tied to the embedding; logits are cut, not labels padded."""

    layer_class: type[nn.Module] = HandWrittenLayer

    def __init__(self, width: int = 32, depth: int = 4, tied: bool = True) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(self.layer_class(width, scaled=i % 2 == 1) for i in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight  # gradients of prologue and epilogue add up

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.loss(self.head(self.norm(x)), labels)

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def build(family: str, **overrides: Any) -> nn.Module:
    """A tiny random model in training mode, whose every parameter has moved off its initial value.

    transformers models use eager attention: the reference shares no attention code with the capture.
    """
    torch.manual_seed(0)
    if family == "hand_written":
        model: nn.Module = HandWritten(**overrides)
    else:
        from transformers import AutoConfig, AutoModelForCausalLM

        model_type = "qwen2" if family == "tied" else family
        sizes = _GPT2 if family == "gpt2" else _SMALL
        config = AutoConfig.for_model(model_type, **{**sizes, **FAMILIES.get(family, {}), **overrides})
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():  # norms start at one and biases at zero, where mix-ups would not show
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model.train()


def batch(rows: int, length: int, ignored: float = 0.0) -> dict[str, Tensor]:
    """Random input_ids and labels, int64 [rows, length]; a share `ignored` of the labels is -100."""
    generator = torch.Generator().manual_seed(rows * 1000 + length)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    labels = torch.where(torch.rand(rows, length, generator=generator) < ignored, -100, ids)
    return {"input_ids": ids, "labels": labels}
