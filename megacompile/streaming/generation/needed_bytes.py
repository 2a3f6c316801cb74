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


def sequence_count(model: nn.Module, prompt: Tensor, given: Mapping[str, Any]) -> int:
    """Sequences that are generated: beams and several sequences for each prompt count."""
    counts = (option_of(model, given, name) for name in ("num_beams", "num_return_sequences"))
    return len(prompt) * max(1, *(count for count in counts if isinstance(count, int)), 1)


def cache_bytes(model: nn.Module, given: Mapping[str, Any]) -> int:
    """Bytes of the keys and values of all tokens, as far as the model's config and the call say it; else 0."""
    prompt, text = prompt_of(given), text_config(model)
    heads = getattr(text, "num_attention_heads", None)
    if prompt is None or heads is None:
        return 0
    new, longest = (option_of(model, given, name) for name in ("max_new_tokens", "max_length"))
    tokens = prompt.shape[1] + new if isinstance(new, int) else max(prompt.shape[1] + NEW_TOKENS, longest or 0)
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    each = 2 * int(text.num_hidden_layers) * int(key_heads * width) * _itemsize(model)
    return sequence_count(model, prompt, given) * tokens * each


def working_bytes(model: nn.Module, given: Mapping[str, Any]) -> int:
    """Bytes for computing a chunk of the prompts, and for the logits of their last tokens (fp32, a few times), as far as the
    config says it; else 0."""
    prompt, text = prompt_of(given), text_config(model)
    hidden = getattr(text, "hidden_size", None)
    if prompt is None or not isinstance(hidden, int):
        return 0
    wide = getattr(text, "intermediate_size", None)
    widths = 6 * hidden + 3 * (wide if isinstance(wide, int) else 4 * hidden)
    rows, chunk = sequence_count(model, prompt, given), option_of(model, given, "prefill_chunk_size")
    tokens = rows * min(prompt.shape[1], chunk or prompt.shape[1])
    return tokens * widths * _itemsize(model) + 4 * 4 * rows * int(getattr(text, "vocab_size", 0))


def _itemsize(model: nn.Module) -> int:
    return next(iter(nn.Module.parameters(model))).element_size()
