"""The state of the global random number generators: those of Python, numpy and torch.

The state of other generators can be saved in `extra`.
"""
from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megacompile import schema

_WORDS = 624  # size of the state of a Mersenne Twister
_word = schema.whole(0, 2**32 - 1)


def _tensor(dtype: torch.dtype, count: int | None = None) -> schema.Rule:
    size = "" if count is None else f" of {count} numbers"
    return schema.must(lambda value: type(value) is Tensor and value.dtype is dtype and value.dim() == 1
                       and count in (None, value.numel()), f"a tensor of {dtype}{size}")


def _in_turn(*rules: schema.Rule) -> schema.Rule:
    """The rule for a tuple with one value for each of `rules`."""
    def rule(value: Any, name: str) -> None:
        schema.sequence(schema.anything, kind=tuple, length=len(rules))(value, name)
        for number, (each, item) in enumerate(zip(rules, value, strict=True)):
            each(item, f"{name}[{number}]")
    return rule


def _python_words(value: Any, name: str) -> None:
    schema.sequence(_word, kind=tuple, length=_WORDS + 1)(value, name)
    schema.whole(0, _WORDS)(value[-1], f"the position of {name}")


_OF_ONE = schema.record({
    "python": _in_turn(schema.whole(3, 3), _python_words, schema.optional(schema.finite())),
    "numpy": _in_turn(schema.one_of(["MT19937"]), _tensor(torch.int32, _WORDS), schema.whole(0, _WORDS), schema.whole(0, 1),
                      schema.finite()),
    "torch": _tensor(torch.uint8),
}, optional={"cuda": _tensor(torch.uint8), "other_ranks": schema.anything})
_OF_OTHERS = schema.sequence(_OF_ONE)


def capture(device: torch.device) -> dict[str, Any]:
    """The state of all generators. `device`: where the model computes; on CUDA its generator is included."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = dict(python=random.getstate(), torch=torch.get_rng_state())
    state["numpy"] = kind, torch.from_numpy(np.array(keys, np.uint32).view(np.int32)), *rest
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def of_ranks(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The states of all ranks as one: that of rank 0, with those of the others."""
    return states[0] if len(states) == 1 else {**states[0], "other_ranks": states[1:]}


def of_rank(state: dict[str, Any], rank: int) -> dict[str, Any]:
    """The state of one rank. A rank that did not exist when the state was saved gets that of rank 0."""
    states = [state, *state.get("other_ranks", ())]
    return states[rank if rank < len(states) else 0]


def check(state: Any, device: torch.device, rank: int = 0) -> None:
    """Raises `SchemaError` for a state that `restore` could not restore on a rank. Changes nothing."""
    _OF_ONE(state, "random")
    _OF_OTHERS(state.get("other_ranks", []), "random['other_ranks']")
    state = of_rank(state, rank)
    generators = {"torch": torch.Generator()}
    if device.type == "cuda":
        generators["cuda"] = torch.Generator(device)
    for name in generators.keys() & state.keys():
        try:
            generators[name].set_state(state[name])
        except (RuntimeError, TypeError) as error:
            raise schema.SchemaError(f"random[{name!r}] is not a state of this generator") from error


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Restores a checked state. If it comes from another kind of device, the device's own generator is left unchanged."""
    kind, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((kind, keys.numpy().view(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
