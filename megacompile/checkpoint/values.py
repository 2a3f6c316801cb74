"""Encodes Python values as JSON without loss: the types that options, schedulers and the user's own state consist of.

JSON types are encoded as themselves. A value that JSON would not preserve becomes an object with one key that begins with `$`:

    {"$tuple": [...]}  {"$dict": [[key, value], ...]}  {"$counter": [[key, value], ...]}  {"$bytes": base64}
    {"$tensor": [dtype, shape, base64]}                                     # decoded on the CPU, for any original device
"""
from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megacompile.errors import CheckpointError, first_line

_SHOWN = 60  # characters of a name in a message

#: Maximum levels of nesting. Python's own limit is some hundreds and depends on the caller, but everything that can be saved
#: must be readable.
DEEPEST = 100


def encode(value: Any, name: str) -> Any:
    """Encodes a value for `json.dumps`. Raises `CheckpointError`, which refers to the value as `name`, for unsupported
    types."""
    return _encoded(value, name, DEEPEST)


def _encoded(value: Any, name: str, levels: int) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if levels == 0:
        raise CheckpointError(f"{name[:_SHOWN]}... is nested deeper than {DEEPEST} levels, which a checkpoint cannot hold: "
                              "flatten it")
    if type(value) is list:
        return [_encoded(item, f"{name}[{i}]", levels - 1) for i, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": _encoded(list(value), name, levels)}
    if type(value) in (dict, Counter):
        if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encoded(item, f"{name}[{key!r}]", levels - 1) for key, item in value.items()}
        items = [[_encoded(key, f"a key of {name}", levels - 1), _encoded(item, f"{name}[{key!r}]", levels - 1)]
                 for key, item in value.items()]
        return {"$dict" if type(value) is dict else "$counter": items}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if type(value) is Tensor:
        flat = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        data = base64.b64encode(flat.numpy().tobytes()).decode("ascii")
        return {"$tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), {"$bytes": data}]}
    raise CheckpointError(f"{name} is a {type(value).__name__}, which a checkpoint cannot hold: it takes None, numbers, "
                          "strings, bytes, lists, tuples, dicts and tensors (anything else would have to be unpickled)")


def decode(value: Any) -> Any:
    """Decodes a value. Raises `CheckpointError` for anything that `encode` does not write."""
    try:
        return _decoded(value, DEEPEST)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"a value does not match its kind ({first_line(error)[:200]})") from error


def _decoded(value: Any, levels: int) -> Any:
    if not isinstance(value, list | dict):
        return value
    if levels == 0:
        raise CheckpointError(f"values are nested deeper than {DEEPEST} levels")
    if isinstance(value, list):
        return [_decoded(item, levels - 1) for item in value]
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: _decoded(item, levels - 1) for key, item in value.items()}
    if len(value) != 1 or tag not in _DECODERS:
        raise CheckpointError(f"unknown kind of value {tag[:_SHOWN]!r}")
    return _of_kind(tag, value[tag], levels - 1)


def _of_kind(tag: str, inside: Any, levels: int) -> Any:
    if not isinstance(inside, str if tag == "$bytes" else list):
        raise CheckpointError(f"a {type(inside).__name__} is not a value of kind {tag!r}")
    return _DECODERS[tag](inside, levels)


def _pairs(items: list[list[Any]], levels: int) -> dict[Any, Any]:
    return {_decoded(key, levels): _decoded(item, levels) for key, item in items}


def _tensor(dtype: str, shape: list[int], data: dict[str, str]) -> Tensor:
    found = getattr(torch, dtype)
    if not isinstance(found, torch.dtype) or any(type(size) is not int or size < 0 for size in shape):
        raise CheckpointError(f"{dtype} {shape} is not a dtype and a shape")
    memory = bytearray(base64.b64decode(data["$bytes"], validate=True))
    return (torch.frombuffer(memory, dtype=found) if memory else torch.empty(0, dtype=found)).view(shape)


_DECODERS: dict[str, Callable[[Any, int], Any]] = {
    "$tuple": lambda items, levels: tuple(_decoded(item, levels) for item in items),
    "$dict": _pairs,
    "$counter": lambda items, levels: Counter(_pairs(items, levels)),
    "$bytes": lambda text, _: base64.b64decode(text, validate=True),
    "$tensor": lambda parts, _: _tensor(*parts),
}
