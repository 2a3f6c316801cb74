"""Other values for attributes of TRL's modules, which have no hooks for what a streamed model needs."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def replaced(module: ModuleType, **values: Any) -> Iterator[None]:
    """A context in which attributes of a module have other values. Raises `AttributeError` if it has no such attribute."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)
