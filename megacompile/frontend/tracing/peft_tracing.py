"""PEFT's adapters: hiding from Dynamo what it cannot follow, and reading through PEFT's wrapper."""
from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

_READER = "dequantize_module_weight"


@contextlib.contextmanager
def traceable_adapters() -> Iterator[None]:
    """A context in which PEFT reads a layer's weight directly, or its values if it is quantized. Before DoRA reads a weight, it
    imports the module of the layer's class to find quantized layers, which Dynamo cannot follow."""
    readers = {key: module for key, module in sys.modules.items() if key.startswith("peft.") and _READER in vars(module)}
    originals = {key: getattr(module, _READER) for key, module in readers.items()}
    for module in readers.values():
        setattr(module, _READER, _weight)
    try:
        yield
    finally:
        for key, module in readers.items():
            setattr(module, _READER, originals[key])


def forward_signature(model: nn.Module) -> inspect.Signature:
    """The signature of a model's `forward`. PEFT's wrappers pass arguments that they do not name on to the model inside, so
    those of its `forward` follow, as keyword arguments."""
    signature = inspect.signature(model.forward)
    own = {name: p for name, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    if len(own) == len(signature.parameters) or not hasattr(model, "get_base_model"):
        return signature
    inside = inspect.signature(model.get_base_model().forward)  # type: ignore[operator]
    if not own:
        return inside
    further = [p if p.kind == p.VAR_KEYWORD else p.replace(kind=p.KEYWORD_ONLY)
               for name, p in inside.parameters.items() if name not in own and p.kind != p.VAR_POSITIONAL]
    return signature.replace(parameters=[*own.values(), *further])


def switch_off_adapters(model: nn.Module) -> None:
    """Switches adapters off as PEFT's `disable_adapter` does."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for module in model.modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            module.enable_adapters(enabled=False)


def _weight(module: Any) -> Tensor:
    weight: Tensor = module.dequantized_weight() if hasattr(module, "dequantized_weight") else module.weight
    return weight
