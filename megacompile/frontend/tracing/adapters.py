"""PEFT's adapters: what Dynamo must not see of them, and what their wrapper hides."""
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


def forward_signature(model: nn.Module) -> inspect.Signature:
    """Of a model's `forward`; of the model inside where PEFT's wrapper takes anything and passes it on."""
    signature = inspect.signature(model.forward)
    passes_on = all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature.parameters.values())
    if passes_on and hasattr(model, "get_base_model"):
        return inspect.signature(model.get_base_model().forward)  # type: ignore[operator]
    return signature


def switch_off_adapters(model: nn.Module) -> None:
    """As PEFT's `disable_adapter` does it."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for module in model.modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            module.enable_adapters(enabled=False)


def _weight(module: Any) -> Tensor:
    weight: Tensor = module.weight
    return weight
