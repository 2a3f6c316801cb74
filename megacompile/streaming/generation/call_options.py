"""What a call of `generate` says: its arguments by name, its prompts, and its options, which may be in a configuration."""
from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn


def by_name(generate: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of a bound `generate` by their names. Raises `TypeError` as the call would."""
    if not args:
        return dict(kwargs)
    signature = inspect.signature(generate)
    if any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values()):  # PEFT's, which passes all on
        from transformers import GenerationMixin

        signature = inspect.signature(GenerationMixin.generate)
        args = (None, *args)
    bound = signature.bind(*args, **kwargs).arguments
    bound.pop("self", None)
    further = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")
    return {name: value for name, value in bound.items() if name != further} | bound.get(further, {})


def option_of(model: nn.Module, given: Mapping[str, Any], name: str) -> Any:
    """An option of a call: its argument, also if that is None; else that of its configuration, or of the model's."""
    if name in given:
        return given[name]
    options = (given.get("generation_config"), getattr(model, "generation_config", None))
    return next((found for each in options if (found := getattr(each, name, None)) is not None), None)


def with_options(given: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """Arguments of `generate` with these options too. transformers accepts options in a configuration or as arguments, and not
    both."""
    found = dict(given)
    if found.get("generation_config") is None:
        return found | options
    found["generation_config"] = copy.deepcopy(found["generation_config"])
    for name, value in options.items():
        setattr(found["generation_config"], name, value)
    return found


def prompt_of(given: Mapping[str, Any]) -> Tensor | None:
    """int [rows, tokens]; None if the call has none."""
    found = next((x for x in (given.get("inputs"), given.get("input_ids")) if isinstance(x, Tensor)), None)
    return found if found is not None and found.dim() == 2 else None


def chooses_cache(model: nn.Module, given: Mapping[str, Any]) -> bool:
    """Whether the user has said how keys and values are kept."""
    return given.get("past_key_values") is not None or option_of(model, given, "use_cache") is False \
        or option_of(model, given, "cache_implementation") is not None
