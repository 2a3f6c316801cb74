"""Decoder shapes with random weights, made on the device that is fast at it."""
from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

SHAPES = {
    "qwen2-7b": dict(vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
                     num_attention_heads=28, num_key_value_heads=4),
    "qwen2-14b": dict(vocab_size=152064, hidden_size=5120, intermediate_size=13824, num_hidden_layers=48,
                      num_attention_heads=40, num_key_value_heads=8),
    "qwen2-32b": dict(vocab_size=152064, hidden_size=5120, intermediate_size=27648, num_hidden_layers=64,
                      num_attention_heads=40, num_key_value_heads=8),
    "tiny": dict(vocab_size=512, hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4,
                 num_key_value_heads=2),
}


def random_model(shape: str, layers: int | None, device: str) -> Any:
    """A bf16 Qwen2 model on the host with weights of standard deviation 0.02, norms of one."""
    config = Qwen2Config(**SHAPES[shape], max_position_embeddings=32768, tie_word_embeddings=False)
    config.num_hidden_layers = layers or config.num_hidden_layers
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    small = copy.deepcopy(config)
    small.num_hidden_layers, small.vocab_size = 1, 8
    buffers = dict(AutoModelForCausalLM.from_config(small, dtype=torch.bfloat16).named_buffers())
    for name, buffer in list(model.named_buffers()):
        if buffer.is_meta:
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._buffers[leaf] = buffers[name]
    torch.manual_seed(0)
    for name, parameter in list(model.named_parameters()):
        value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        value = value.fill_(1.0) if "norm" in name else value.normal_(0, 0.02)
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = nn.Parameter(value.cpu())
    return model.train()
