"""A call of `generate` in parts of its batch, one after another, where the keys and values of all sequences do not fit."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.streaming.generation.call_options import option_of, prompt_of

#: Tensors with one row for each prompt.
_BY_ROW = frozenset({"inputs", "input_ids", "attention_mask", "token_type_ids"})
#: Options whose results are those of the batch at once.
_WHOLE_BATCH = ("return_dict_in_generate", "max_time")


def part_counts(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[int]:
    """Into how many parts the batch can be cut: 1, 2, 4, ... up to one prompt in each. Only 1 if the results of parts could
    differ from those of the batch in more than the numbers that sampling draws, or could not be joined."""
    yield 1
    prompt, count = prompt_of(args, kwargs), 1
    if prompt is None or not _can_be_cut(model, args, kwargs):
        return
    while count < len(prompt):
        count = min(2 * count, len(prompt))
        yield count


def _can_be_cut(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    options = getattr(model, "generation_config", None)
    known = _BY_ROW | {"generation_config", "tokenizer"}
    given = {name for name, value in kwargs.items() if value is not None and value is not False}
    if len(args) > 1 or any(name not in known and not hasattr(options, name) for name in given):
        return False  # streamers, processors and criteria of the caller's, images, another model
    if any(option_of(model, kwargs, name) for name in _WHOLE_BATCH):
        return False
    ends = any(option_of(model, kwargs, name) is not None for name in ("eos_token_id", "stop_strings"))
    return not ends or _padding(model, kwargs) is not None


def _padding(model: nn.Module, kwargs: Mapping[str, Any]) -> int | None:
    """The token that transformers writes after the end of a sequence."""
    for name in ("pad_token_id", "eos_token_id"):
        found = option_of(model, kwargs, name)
        if found is not None:
            return int(torch.as_tensor(found).flatten()[0])
    return None


def part_of(number: int, count: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments of part `number` of `count`. The first part is at least as large as any other."""
    prompt = prompt_of(args, kwargs)
    if count == 1 or prompt is None:
        return args, dict(kwargs)
    size, larger = divmod(len(prompt), count)
    start = number * size + min(number, larger)
    rows = slice(start, start + size + (number < larger))
    return ([arg[rows] for arg in args],
            {name: value[rows] if name in _BY_ROW and isinstance(value, Tensor) else value for name, value in kwargs.items()})


def generate_in_parts(generate: Callable[..., Any], count: int, model: nn.Module, args: Sequence[Any],
                      kwargs: Mapping[str, Any]) -> Any:
    """The result of `generate(*args, **kwargs)`: int [sequences, tokens] if there are several parts. Sequences that end before
    the longest of all parts are padded as those of one batch."""
    if count == 1:
        return generate(*args, **kwargs)
    found = []
    for number in range(count):
        part, options = part_of(number, count, args, kwargs)
        found.append(generate(*part, **options))
    longest = max(tokens.shape[1] for tokens in found)
    padding = _padding(model, kwargs) or 0
    return torch.cat([nn.functional.pad(tokens, (0, longest - tokens.shape[1]), value=padding) for tokens in found])
