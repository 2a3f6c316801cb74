"""Ways to call `generate` with the plain model on the device, the fastest first, and the device memory that each takes."""
from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from megacompile.streaming.device_copy import Turns

#: Fewest tokens, of all sequences together, that prompts are computed in at a time. Kernels of fewer leave the device idle, and
#: each chunk copies the layers that take turns once more.
LEAST_CHUNK = 4096


@dataclass(frozen=True)
class Way:
    """`turns`: which layers take turns in slots. `bytes`: of device memory beside the weights. `kwargs`: of `generate`."""

    turns: Turns
    bytes: int
    kwargs: dict[str, Any]


def ways_to_generate(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any],
                     fits: Callable[[int, Turns], bool]) -> Iterator[Way]:
    """The ways that fit, of which the next is tried when memory ends with one. `fits`: as `DeviceCopy.fits`. In each of them
    the prompts are computed in chunks that are as large as fit.

    The caches of keys and values that transformers offloads wait in host memory, but for those of two layers."""
    cache = cache_bytes(model, args, kwargs)
    prefills = [(working_bytes(model, args, options), options) for options in _prefills(model, args, kwargs)]

    def way(turns: Turns, kept: int, **options: Any) -> Way | None:
        return next((Way(turns, kept + working, with_options(given, **options)) for working, given in prefills
                     if fits(kept + working, turns)), None)

    whole = way(Turns.NONE, cache)
    if whole is not None:
        yield whole
    # Copies of layers are issued between them, which compiled code does not know.
    in_turns = way(Turns.ALL, cache, disable_compile=True)
    if in_turns is not None:
        if whole is None:
            yield replace(in_turns, turns=Turns.SOME)
        yield in_turns
    layers = getattr(_text_config(model), "num_hidden_layers", 0)
    if not layers or _chooses_cache(model, kwargs):
        return
    offloaded = way(Turns.ALL, 2 * cache // layers, disable_compile=True, cache_implementation="offloaded")
    if offloaded is not None:
        yield offloaded


def _prefills(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Arguments of `generate` with which the prompts are computed at once, or in ever smaller chunks. Only the user's own if
    the user has chosen, or if transformers cannot continue a chunk: with a recurrent state, without a cache, and with other
    inputs than tokens and their mask."""
    yield dict(kwargs)
    prompt, has_cache = _prompt(args, kwargs), getattr(model, "_supports_default_dynamic_cache", lambda: False)
    further = {name for name, value in kwargs.items() if isinstance(value, Tensor)} - {"inputs", "input_ids", "attention_mask"}
    if (prompt is None or further or not has_cache() or getattr(model, "_is_stateful", False)
            or _option(model, kwargs, "prefill_chunk_size") is not None or _option(model, kwargs, "use_cache") is False):
        return
    rows, chunk = _rows(model, prompt, kwargs), 1 << max(0, prompt.shape[1] - 1).bit_length()
    while (chunk := chunk // 2) and rows * chunk >= LEAST_CHUNK:
        yield with_options(kwargs, prefill_chunk_size=chunk)


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
    """Bytes for computing a chunk of the prompts, and for the logits of their last tokens (fp32, a few times), as far as the
    config says it; else 0."""
    prompt, text = _prompt(args, kwargs), _text_config(model)
    hidden = getattr(text, "hidden_size", None)
    if prompt is None or not isinstance(hidden, int):
        return 0
    wide = getattr(text, "intermediate_size", None)
    widths = 6 * hidden + 3 * (wide if isinstance(wide, int) else 4 * hidden)
    rows, chunk = _rows(model, prompt, kwargs), _option(model, kwargs, "prefill_chunk_size")
    tokens = rows * min(prompt.shape[1], chunk or prompt.shape[1])
    return tokens * widths * _itemsize(model) + 4 * 4 * rows * int(getattr(text, "vocab_size", 0))


def _itemsize(model: nn.Module) -> int:
    return next(iter(nn.Module.parameters(model))).element_size()
