"""What a call of `generate` says: its prompts, and its options, which are arguments or in a configuration."""
from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn


def option_of(model: nn.Module, kwargs: Mapping[str, Any], name: str) -> Any:
    """An option of the call, of its configuration, or of the model's."""
    given = kwargs.get("generation_config") or getattr(model, "generation_config", None)
    return kwargs.get(name, getattr(given, name, None))


def with_options(kwargs: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """Arguments of `generate` with these options too. transformers accepts options in a configuration or as arguments, and not
    both."""
    found = dict(kwargs)
    if found.get("generation_config") is None:
        return found | options
    found["generation_config"] = copy.deepcopy(found["generation_config"])
    for name, value in options.items():
        setattr(found["generation_config"], name, value)
    return found


def prompt_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """int [rows, tokens]; None if the call has none."""
    found = next((x for x in (*args[:1], kwargs.get("inputs"), kwargs.get("input_ids")) if isinstance(x, Tensor)), None)
    return found if found is not None and found.dim() == 2 else None


def chooses_cache(model: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """Whether the user has said how keys and values are kept."""
    names = ("past_key_values", "cache_implementation")
    return any(kwargs.get(name) is not None for name in names) or option_of(model, kwargs, "cache_implementation") is not None \
        or option_of(model, kwargs, "use_cache") is False
