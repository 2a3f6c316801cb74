"""Python values as JSON, to the bit: what options, schedulers and the user's own state are made of, and nothing else.

JSON's own types stand for themselves. What JSON would change on the way is an object of one key that begins with `$`:

    {"$tuple": [...]}  {"$dict": [[key, value], ...]}  {"$counter": [[key, value], ...]}  {"$bytes": base64}
    {"$tensor": [dtype, shape, base64]}                                     # on the CPU, whatever device it came from
"""
from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megacompile.errors import CheckpointError


def encode(value: Any, name: str) -> Any:
    """What `json.dumps` takes. Raises `CheckpointError` for any other value; `name` is what the message calls it."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [encode(item, f"{name}[{i}]") for i, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": encode(list(value), name)}
    if type(value) in (dict, Counter):
        if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encode(item, f"{name}[{key!r}]") for key, item in value.items()}
        items = [[encode(key, f"a key of {name}"), encode(item, f"{name}[{key!r}]")] for key, item in value.items()]
        return {"$dict" if type(value) is dict else "$counter": items}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if type(value) is Tensor:
        flat = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        return {"$tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), encode(flat.numpy().tobytes(), name)]}
    raise CheckpointError(f"{name} is a {type(value).__name__}, which a checkpoint cannot hold: it takes None, numbers, "
                          "strings, bytes, lists, tuples, dicts and tensors (anything else would have to be unpickled)")


def decode(value: Any) -> Any:
    """What was encoded. Raises `CheckpointError` for what `encode` never writes."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: decode(item) for key, item in value.items()}
    if len(value) != 1 or tag not in _DECODERS:
        raise CheckpointError(f"there is no value of kind {tag!r}")
    return _DECODERS[tag](value[tag])


def _tensor(parts: list[Any]) -> Tensor:
    dtype, shape, data = parts
    found = getattr(torch, dtype)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"there is no dtype {dtype!r}")
    memory = bytearray(decode(data))
    return (torch.frombuffer(memory, dtype=found) if memory else torch.empty(0, dtype=found)).view(shape)


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$tuple": lambda items: tuple(map(decode, items)),
    "$dict": lambda items: {decode(key): decode(item) for key, item in items},
    "$counter": lambda items: Counter({decode(key): decode(item) for key, item in items}),
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$tensor": _tensor,
}
