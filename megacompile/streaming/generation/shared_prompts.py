"""Prompts that several sequences begin with are computed once, as in GRPO, which samples several completions of each prompt."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.streaming.generation.ways import (
    BY_ROW,
    can_be_cut,
    chooses_cache,
    has_dynamic_cache,
    option_of,
    prompt_of,
    with_options,
)


def generate_sharing(generate: Callable[..., Any], model: nn.Module, given: Mapping[str, Any]) -> Any:
    """The result of `generate(**given)`. If rows of the batch are equal, or `num_return_sequences` asks for several of each,
    a first call computes each prompt once, without its last token, and all its sequences begin with these keys and values."""
    sequences = int(option_of(model, given, "num_return_sequences") or 1)
    equal = equal_rows(given) if _can_share(model, given) else 0
    if equal * sequences <= 1:
        return generate(**given)
    by_row = {name: value for name, value in given.items() if name in BY_ROW and isinstance(value, Tensor)}
    first = {**given, **{name: value[::equal, :-1] for name, value in by_row.items()}}
    chunk = option_of(model, given, "prefill_chunk_size")  # which has room for all rows
    larger = {} if chunk is None else {"prefill_chunk_size": chunk * equal * sequences}
    cache = generate(**with_options(first, max_new_tokens=1, min_new_tokens=1, min_length=0, do_sample=False,
                                    num_return_sequences=1, return_dict_in_generate=True, **larger)).past_key_values
    cache.batch_repeat_interleave(equal * sequences)
    then = {**given, **{name: value.repeat_interleave(sequences, 0) for name, value in by_row.items()}}
    at_once = {} if chunk is None else {"prefill_chunk_size": None}
    return generate(**with_options({**then, "past_key_values": cache}, num_return_sequences=1, **at_once))


def equal_rows(given: Mapping[str, Any]) -> int:
    """The number of equal rows, one after another, that each prompt has; 1 unless it is the same for all prompts."""
    by_row = [value for name, value in given.items() if name in BY_ROW and isinstance(value, Tensor)]
    count = len(by_row[0])
    same = torch.stack([(value[1:] == value[:-1]).flatten(1).all(1) for value in by_row]).all(0)
    changes = (~same).nonzero().flatten().tolist()  # rows after which another prompt begins
    found = changes[0] + 1 if changes else count
    return found if changes == list(range(found - 1, count - 1, found)) and count % found == 0 else 1


def _can_share(model: nn.Module, given: Mapping[str, Any]) -> bool:
    """True if the call gives nothing but prompts and options, and a later call can go on with keys and values of prompts alone:
    without beams, recurrent states, and a cache that the user has chosen. Transformers refuses several greedy sequences of a
    prompt by itself."""
    prompt = prompt_of(given)
    return (prompt is not None and prompt.shape[1] > 1 and isinstance(option_of(model, given, "max_new_tokens"), int)
            and can_be_cut(model, given) and not chooses_cache(model, given) and has_dynamic_cache(model)
            and not getattr(model, "_is_stateful", False) and (option_of(model, given, "num_beams") or 1) == 1
            and (bool(option_of(model, given, "do_sample")) or (option_of(model, given, "num_return_sequences") or 1) == 1)
            and getattr(getattr(model, "generation_config", None), "prefill_chunk_size", None) is None)
