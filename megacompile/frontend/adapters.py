"""What Dynamo must not see of PEFT's adapters."""
from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor

_READER = "dequantize_module_weight"


@contextlib.contextmanager
def traceable_adapters() -> Iterator[None]:
    """Within, PEFT reads a layer's weight as it is. Before DoRA reads one, it asks for the module of its class, to find
    quantised ones, which Dynamo cannot follow; a streamed model has none."""
    readers = {key: module for key, module in sys.modules.items() if key.startswith("peft.") and _READER in vars(module)}
    originals = {key: getattr(module, _READER) for key, module in readers.items()}
    for module in readers.values():
        setattr(module, _READER, _weight)
    try:
        yield
    finally:
        for key, module in readers.items():
            setattr(module, _READER, originals[key])


def _weight(module: Any) -> Tensor:
    weight: Tensor = module.weight
    return weight
