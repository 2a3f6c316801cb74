"""The device memory that a call of `generate` takes beside the weights."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from megacompile.streaming.generation.call_options import option_of, prompt_of

#: What transformers generates if nothing says how much.
NEW_TOKENS = 20


def text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def layer_configs(model: nn.Module) -> list[Any]:
    """The config of each layer. Some families have layers of several sizes; the config of such a model raises for options that
    layers have of their own."""
    config = text_config(model)
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * int(getattr(config, "num_hidden_layers", 0))


def sequence_count(model: nn.Module, prompt: Tensor, given: Mapping[str, Any]) -> int:
    """Sequences that are generated: beams and several sequences for each prompt count."""
    counts = (option_of(model, given, name) for name in ("num_beams", "num_return_sequences"))
    return len(prompt) * max(1, *(count for count in counts if isinstance(count, int)), 1)


def cache_bytes(model: nn.Module, given: Mapping[str, Any]) -> int:
    """Bytes of the keys and values of all tokens, as far as the model's config and the call say it; else 0."""
    prompt = prompt_of(given)
    if prompt is None:
        return 0
    new, longest = (option_of(model, given, name) for name in ("max_new_tokens", "max_length"))
    tokens = prompt.shape[1] + new if isinstance(new, int) else max(prompt.shape[1] + NEW_TOKENS, longest or 0)
    each = 2 * sum(map(_key_width, layer_configs(model))) * _itemsize(model)
    return sequence_count(model, prompt, given) * tokens * each


def _key_width(layer: Any) -> int:
    """The elements of a token's keys in a layer, or of its values, as far as the layer's config says it; else 0."""
    heads = getattr(layer, "num_attention_heads", None)
    if heads is None:
        return 0
    width = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    return int((getattr(layer, "num_key_value_heads", None) or heads) * width)


def working_bytes(model: nn.Module, given: Mapping[str, Any]) -> int:
    """Bytes for computing a chunk of the prompts, and for the logits of their last tokens (fp32, a few times), as far as the
    config says it; else 0."""
    prompt, widths = prompt_of(given), max(map(_working_width, layer_configs(model) or [text_config(model)]))
    if prompt is None or not widths:
        return 0
    rows, chunk = sequence_count(model, prompt, given), option_of(model, given, "prefill_chunk_size")
    tokens = rows * min(prompt.shape[1], chunk or prompt.shape[1])
    return tokens * widths * _itemsize(model) + 4 * 4 * rows * int(getattr(text_config(model), "vocab_size", 0))


def _working_width(layer: Any) -> int:
    """The elements that a layer computes for a token, as far as its config says it; else 0."""
    hidden, wide = getattr(layer, "hidden_size", None), getattr(layer, "intermediate_size", None)
    return 6 * hidden + 3 * (wide if isinstance(wide, int) else 4 * hidden) if isinstance(hidden, int) else 0


def _itemsize(model: nn.Module) -> int:
    return next(iter(nn.Module.parameters(model))).element_size()
