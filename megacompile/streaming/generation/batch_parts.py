"""A call of `generate` in parts of its batch, one after another, where the keys and values of all sequences do not fit."""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.frontend.tracing.model_options import rope_types
from megacompile.streaming.generation.call_options import option_of, prompt_of

#: Tensors with one row for each prompt.
_BY_ROW = frozenset({"inputs", "input_ids", "attention_mask", "token_type_ids"})
#: Options that need the whole batch: results that cannot be joined, a time for all rows, prompts that are padded anew.
_WHOLE_BATCH = ("return_dict_in_generate", "max_time", "token_healing")


def part_counts(model: nn.Module, given: Mapping[str, Any]) -> Iterator[int]:
    """Into how many parts the batch can be cut: 1, 2, 4, ... up to one prompt in each. Only 1 if the results of parts could
    differ from those of the batch in more than the numbers that sampling draws, or could not be joined."""
    yield 1
    prompt, count = prompt_of(given), 1
    if prompt is None or not _can_be_cut(model, given):
        return
    while count < len(prompt):
        count = min(2 * count, len(prompt))
        yield count


def _can_be_cut(model: nn.Module, given: Mapping[str, Any]) -> bool:
    known = _BY_ROW | {"generation_config", "tokenizer"}
    options = getattr(model, "generation_config", None)
    if any(name not in known and not hasattr(options, name) for name, value in given.items()
           if value is not None and value is not False):
        return False  # streamers, processors and criteria of the caller's, images, another model
    if any(option_of(model, given, name) for name in _WHOLE_BATCH) or reads_longest_row(model):
        return False
    if option_of(model, given, "cache_implementation") == "paged":
        return False  # the result has another shape
    # Without an end token transformers pads nothing: a row that has met a stop string goes on until all rows have.
    return _first(option_of(model, given, "eos_token_id")) is not None or option_of(model, given, "stop_strings") is None


def reads_longest_row(model: nn.Module) -> bool:
    """Whether the tokens of a row may depend on other rows, or on how many tokens are computed at once: rotary frequencies of
    LongRoPE follow the largest position of a call, and a model of the user's may compute with several rows."""
    handle = getattr(model, "megacompile", None)
    return bool(handle is not None and handle.streamed.captured.across_rows) or any(
        "longrope" in kind or "dynamic" in kind for module in nn.Module.modules(model) for kind in rope_types(module))


def _first(tokens: Any) -> int | None:
    return None if tokens is None else int(torch.as_tensor(tokens).flatten()[0])


def _padding(model: nn.Module, given: Mapping[str, Any]) -> int:
    """The token that transformers writes after the end of a sequence. Beam search takes a 0 for no token."""
    end, padding = (_first(option_of(model, given, name)) for name in ("eos_token_id", "pad_token_id"))
    beams = (option_of(model, given, "num_beams") or 1) > 1
    found = end if padding is None or (beams and padding == 0) else padding
    assert found is not None, "without an end token all sequences are as long"
    return found


def part_of(number: int, count: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of part `number` of `count`. The first part is at least as large as any other."""
    prompt = prompt_of(given)
    if count == 1 or prompt is None:
        return dict(given)
    return _with_rows(given, _rows_of_part(number, count, len(prompt)))


def _rows_of_part(number: int, count: int, prompts: int) -> slice:
    size, larger = divmod(prompts, count)
    start = number * size + min(number, larger)
    return slice(start, start + size + (number < larger))


def _with_rows(given: Mapping[str, Any], rows: slice) -> dict[str, Any]:
    """The arguments for these prompts."""
    return {name: value[rows] if name in _BY_ROW and isinstance(value, Tensor) else value for name, value in given.items()}


@dataclass
class Finished:
    """The parts of a batch whose generation has ended, in the order of the batch. State: how many `prompts` they have, and the
    `tokens` of each part, int [sequences, tokens]."""

    prompts: int = 0
    tokens: list[Tensor] = field(default_factory=list)


def generate_in_parts(generate: Callable[..., Any], count: int, model: nn.Module, given: Mapping[str, Any],
                      finished: Finished | None = None) -> Any:
    """The result of `generate(**given)`: int [sequences, tokens] if there are several parts. Sequences that end before the
    longest of all parts are padded as those of one batch. `finished`: parts that are not generated again. Each part is added to
    it, and stays there if a later one runs out of memory."""
    finished = Finished() if finished is None else finished
    prompt = prompt_of(given)
    if prompt is None or (count == 1 and not finished.prompts):
        return generate(**given)
    first, left = finished.prompts, len(prompt) - finished.prompts
    if first:  # no part may be larger than the largest of `count` parts of the whole batch
        count = math.ceil(left / math.ceil(len(prompt) / count))
    for number in range(count):
        rows = _rows_of_part(number, count, left)
        finished.tokens.append(generate(**_with_rows(given, slice(first + rows.start, first + rows.stop))))
        finished.prompts = first + rows.stop
    longest = max(tokens.shape[1] for tokens in finished.tokens)
    return torch.cat([tokens if tokens.shape[1] == longest else nn.functional.pad(
        tokens, (0, longest - tokens.shape[1]), value=_padding(model, given)) for tokens in finished.tokens])
