"""What does not train, on models without weights: layers that are frozen, and all but an adapter."""
from __future__ import annotations

from typing import Any

import torch

from megacompile.errors import ArgumentError
from megacompile.frontend.layers import find_layers


def freeze_lowest(model: Any, count: int) -> None:
    """Freezes the lowest `count` layers of a model of transformers and, if any, its embeddings: a backward ends above them.

    Raises `ArgumentError` for more layers than there are."""
    if not count:
        return
    stack = find_layers(model)
    if count > len(stack.layers):
        raise ArgumentError(f"{count} layers cannot be frozen: {type(model).__name__} has {len(stack.layers)}")
    for module in (model.get_input_embeddings(), *stack.layers[:count]):
        module.requires_grad_(False)


def with_adapter(model: Any, adapter: Any) -> Any:
    """PEFT's wrapper with an adapter of this configuration around a model on the meta device, in the dtype of its weights."""
    from peft import get_peft_model

    with torch.device("meta"):
        return get_peft_model(model, adapter, autocast_adapter_dtype=False)
