"""Decoder shapes with random weights, made on the device that is fast at it."""
from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from megacompile.runtime.store import available_host_bytes
from megacompile.tiling import HOST_MARGIN_BYTES

SHAPES: dict[str, dict[str, int]] = {
    "qwen2-7b": dict(vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
                     num_attention_heads=28, num_key_value_heads=4),
    "qwen2-14b": dict(vocab_size=152064, hidden_size=5120, intermediate_size=13824, num_hidden_layers=48,
                      num_attention_heads=40, num_key_value_heads=8),
    "qwen2-32b": dict(vocab_size=152064, hidden_size=5120, intermediate_size=27648, num_hidden_layers=64,
                      num_attention_heads=40, num_key_value_heads=8),
    "tiny": dict(vocab_size=512, hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4,
                 num_key_value_heads=2),
    # Layers of the 7B shape, wider and wider. A small vocabulary: it is the layers that are to be seen.
    **{f"wide-{times}": dict(vocab_size=32000, hidden_size=3584 * times, intermediate_size=18944 * times, num_hidden_layers=4,
                             num_attention_heads=28 * times, num_key_value_heads=4 * times) for times in range(1, 6)},
}
#: Of host memory while a model is taken over: 14 in tiles and 2 as it was made, which goes tile by tile.
BYTES_PER_PARAMETER = 16


def config(shape: str, layers: int | None = None) -> Qwen2Config:
    sizes = SHAPES[shape] | ({"num_hidden_layers": layers} if layers else {})
    return Qwen2Config(**sizes, max_position_embeddings=2**20, tie_word_embeddings=False)


def parameters(shape: str, layers: int) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config(shape, layers)).parameters())


def layers_that_fit(shape: str, host_bytes: int | None = None) -> int:
    """The most layers of a shape that so much host memory (None: what is available) can train; one at least."""
    available = (available_host_bytes() if host_bytes is None else host_bytes) - HOST_MARGIN_BYTES
    one, two = parameters(shape, 1), parameters(shape, 2)
    fitting = 1 + (available // BYTES_PER_PARAMETER - one) // (two - one)
    return max(1, min(SHAPES[shape]["num_hidden_layers"], fitting))


def random_model(shape: str, layers: int | None, device: str) -> Any:
    """A bf16 Qwen2 model on the host with weights of standard deviation 0.02, norms of one."""
    whole = config(shape, layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(whole, dtype=torch.bfloat16)
    small = copy.deepcopy(whole)
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
