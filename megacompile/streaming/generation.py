"""How much device memory a call of `generate` takes beside the weights."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn


def cache_bytes(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Bytes of the keys and values of all tokens, as far as the model's config and the call say it; else 0. Beams and several
    sequences for each prompt count."""
    prompt = next((x for x in (*args[:1], kwargs.get("inputs"), kwargs.get("input_ids")) if isinstance(x, Tensor)), None)
    config: Any = getattr(model, "config", None)
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(text, "num_attention_heads", None)
    if prompt is None or prompt.dim() != 2 or heads is None:
        return 0
    given = kwargs.get("generation_config") or getattr(model, "generation_config", None)

    def option(name: str) -> int:
        value = kwargs.get(name, getattr(given, name, None))
        return value if isinstance(value, int) else 0

    tokens = max(prompt.shape[1] + option("max_new_tokens"), option("max_length") if not option("max_new_tokens") else 0)
    rows = len(prompt) * max(1, option("num_beams"), option("num_return_sequences"))
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    itemsize = next(iter(nn.Module.parameters(model))).element_size()
    return 2 * int(text.num_hidden_layers) * rows * tokens * int(key_heads * width) * itemsize
