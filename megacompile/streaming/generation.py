"""Ways to call `generate` with the plain model on the device, the fastest first, and the device memory that each takes."""
from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megacompile.streaming.device_copy import Turns


@dataclass(frozen=True)
class Way:
    """`turns`: which layers take turns in slots. `bytes`: of device memory beside the weights. `kwargs`: of `generate`."""

    turns: Turns
    bytes: int
    kwargs: dict[str, Any]


def ways_to_generate(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any],
                     fits: Callable[[int, Turns], bool]) -> Iterator[Way]:
    """The ways that fit, of which the next is tried when memory ends with one. `fits`: as `DeviceCopy.fits`.

    The caches of keys and values that transformers offloads wait in host memory, but for those of two layers."""
    cache, working = cache_bytes(model, args, kwargs), working_bytes(model, args, kwargs)
    whole = fits(cache + working, Turns.NONE)
    if whole:
        yield Way(Turns.NONE, cache + working, dict(kwargs))
    in_turns = with_options(kwargs, disable_compile=True)  # copies are issued between layers
    if fits(cache + working, Turns.ALL):
        if not whole:
            yield Way(Turns.SOME, cache + working, in_turns)
        yield Way(Turns.ALL, cache + working, in_turns)
    layers = getattr(_text_config(model), "num_hidden_layers", 0)
    if not layers or _chooses_cache(model, kwargs):
        return
    of_two = 2 * cache // layers
    if fits(of_two + working, Turns.ALL):
        yield Way(Turns.ALL, of_two + working, with_options(in_turns, cache_implementation="offloaded"))


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


def _chooses_cache(model: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """Whether the user has said how keys and values are kept."""
    names = ("past_key_values", "cache_implementation")
    return any(kwargs.get(name) is not None for name in names) or _option(model, kwargs, "cache_implementation") is not None \
        or _option(model, kwargs, "use_cache") is False


def _option(model: nn.Module, kwargs: Mapping[str, Any], name: str) -> Any:
    """An option of the call, of its configuration, or of the model's."""
    given = kwargs.get("generation_config") or getattr(model, "generation_config", None)
    return kwargs.get(name, getattr(given, name, None))


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _prompt(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """int [rows, tokens]; None if the call has none."""
    found = next((x for x in (*args[:1], kwargs.get("inputs"), kwargs.get("input_ids")) if isinstance(x, Tensor)), None)
    return found if found is not None and found.dim() == 2 else None


def _rows(model: nn.Module, prompt: Tensor, kwargs: Mapping[str, Any]) -> int:
    """Sequences that are generated: beams and several sequences for each prompt count."""
    counts = (_option(model, kwargs, name) for name in ("num_beams", "num_return_sequences"))
    return len(prompt) * max(1, *(count for count in counts if isinstance(count, int)), 1)


def cache_bytes(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Bytes of the keys and values of all tokens, as far as the model's config and the call say it; else 0."""
    prompt, text = _prompt(args, kwargs), _text_config(model)
    heads = getattr(text, "num_attention_heads", None)
    if prompt is None or heads is None:
        return 0
    new, longest = (_option(model, kwargs, name) for name in ("max_new_tokens", "max_length"))
    tokens = prompt.shape[1] + new if isinstance(new, int) else max(prompt.shape[1], longest or 0)
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    each = 2 * int(text.num_hidden_layers) * int(key_heads * width) * _itemsize(model)
    return _rows(model, prompt, kwargs) * tokens * each


def working_bytes(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Bytes for computing the prompts, all at a time, and for the logits of their last tokens (fp32, a few times), as far as
    the config says it; else 0."""
    prompt, text = _prompt(args, kwargs), _text_config(model)
    hidden = getattr(text, "hidden_size", None)
    if prompt is None or not isinstance(hidden, int):
        return 0
    wide = getattr(text, "intermediate_size", None)
    widths = 6 * hidden + 3 * (wide if isinstance(wide, int) else 4 * hidden)
    logits = 4 * 4 * _rows(model, prompt, kwargs) * int(getattr(text, "vocab_size", 0))
    return prompt.numel() * widths * _itemsize(model) + logits


def _itemsize(model: nn.Module) -> int:
    return next(iter(nn.Module.parameters(model))).element_size()
