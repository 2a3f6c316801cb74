"""Which stored tensor is which parameter: by name, as transformers' loader renames tensors, then by shape, dtype and ties.

A rename changes only the name (an old layout's names, a base model's prefix). Where a checkpoint needs arithmetic (experts
stored one by one and used as one tensor), the match says so, and transformers' loader has to load it.
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from megacompile.errors import CheckpointError
from megacompile.weights.weight_files import DTYPES, FLOATS, StoredTensor, WeightReader

#: The most lines of a list that an error shows.
_SHOWN = 12
_COMPARED_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Match:
    """Where a model's values are stored.

    `sources`: the stored tensor of each parameter (by its first name) and persistent buffer. `missing`: parameters and buffers
    without one. `unused`: stored tensors that the model does not have. `wrong`: sentences about tensors that do not fit their
    name. `converted`: stored tensors that need more than a rename."""

    sources: Mapping[str, StoredTensor]
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()

    def text(self) -> str:
        """A line for everything that does not match; empty if all matches."""
        lines = [*self.wrong, *(f"{name} is in no file" for name in self.missing),
                 *(f"{name} is stored, and the model does not have it" for name in self.unused)]
        shown = lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more"]
        return "\n".join(f"  {line}" for line in shown)

    def check(self, where: object, model: nn.Module, strict: bool) -> None:
        """Raises `CheckpointError` with the list of mismatches; without `strict` only if some are `wrong`."""
        if self.wrong or (strict and (self.missing or self.unused)):
            counts = {"do not fit": self.wrong, "are missing": self.missing, "are not used": self.unused}
            said = ", ".join(f"{len(names)} {what}" for what, names in counts.items() if names)
            otherwise = "start those missing from random values" if self.missing else "leave those out"
            remedy = ("give the config that belongs to it" if self.wrong else
                      f"give the checkpoint that belongs to it, or strict=False to {otherwise}")
            raise CheckpointError(f"{where} is not a checkpoint of {type(model).__name__} as configured ({said}): {remedy}\n"
                                  f"{self.text()}")


def match(model: Any, stored: Mapping[str, StoredTensor], reader: WeightReader) -> Match:
    """Finds the stored tensor of each parameter and persistent buffer of a transformers model. The current values of parameters
    are not read. `reader` has the files open: stored copies of tied parameters are compared and must be equal."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    parameters = {id(p): name for name, p in model.named_parameters()}  # the first name of each
    names, converted = _model_names(model, stored, state)
    sources: dict[str, StoredTensor] = {}
    wrong, unused = [], []
    for origin, name in names.items():
        found = stored[origin]
        if name not in state:
            unused.append(origin)
            continue
        tensor = state[name]
        first = parameters.get(id(tensor), name)
        if found.shape != tuple(tensor.shape):
            wrong.append(f"{origin} has shape {list(found.shape)}, and {name} has {list(tensor.shape)}")
        elif found.dtype not in FLOATS if tensor.is_floating_point() else DTYPES.get(found.dtype) != tensor.dtype:
            wrong.append(f"{origin} is stored as {found.dtype}, which cannot become {name} in {tensor.dtype} (quantized "
                         "weights are not trained)")
        elif first in sources and not reader.equal(sources[first], found, _COMPARED_ELEMENTS):
            wrong.append(f"{sources[first].name} and {origin} differ, and the config ties them: set tie_word_embeddings=False "
                         "in it if they should differ")
        else:
            sources.setdefault(first, found)
    wanted = {parameters.get(id(tensor), name): name for name, tensor in state.items()}
    known = {parameters.get(id(state[name]), name) for name in names.values() if name in state}
    forgivable = _patterns(getattr(model, "_keys_to_ignore_on_load_missing", None))
    trained = set(parameters.values())
    missing = [name for name in wanted if name not in known and (name in trained or not _any(forgivable, name))]
    return Match(sources, tuple(missing), tuple(_without_leftovers(model, unused)), tuple(wrong), tuple(converted))


def _model_names(model: Any, stored: Iterable[str], state: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """(the model's name for each stored tensor, as in transformers' loader; the tensors that the loader would convert)."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    names, converted = {}, []
    for origin in stored:
        name, conversion = rename_source_key(origin, renamings, converters, model.base_model_prefix, state)
        if name not in state and origin in state:  # in the model's own layout already
            name, conversion = rename_source_key(origin, [], [], model.base_model_prefix, state)
        names[origin] = name
        if conversion is not None and name in state:
            converted.append(origin)
    # `save_pretrained` writes the names that were read.
    model._weight_conversions = [entry for entry in mapping if entry.was_used()]
    return names, converted


def _without_leftovers(model: Any, unused: Iterable[str]) -> list[str]:
    """The unused names, without tensors that only older versions stored: buffers that are no longer persistent, and names that
    the model's class allows."""
    patterns = _patterns(getattr(model, "_keys_to_ignore_on_load_unexpected", None))
    computed = {_last_words(name) for name, _ in model.named_buffers()}
    return [name for name in unused if _last_words(name) not in computed and not _any(patterns, name)]


def _last_words(name: str) -> tuple[str, ...]:
    return tuple(name.split(".")[-2:])


def _patterns(given: Iterable[str] | None) -> list[re.Pattern[str]]:
    return [re.compile(pattern) for pattern in given or ()]


def _any(patterns: Iterable[re.Pattern[str]], name: str) -> bool:
    return any(pattern.search(name) for pattern in patterns)
