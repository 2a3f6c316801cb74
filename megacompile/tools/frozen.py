"""Freezes the lowest layers of a model, which may have no weights yet."""
from __future__ import annotations

from typing import Any

from megacompile.errors import ArgumentError
from megacompile.frontend.tracing.layers import find_layers


def freeze_lowest(model: Any, count: int) -> None:
    """Freezes the lowest `count` layers of a model from transformers and, if `count` is not 0, its embeddings. The backward
    then ends above them.

    Raises `ArgumentError` if the model has fewer layers."""
    if not count:
        return
    stack = find_layers(model)
    if count > len(stack.layers):
        raise ArgumentError(f"{count} layers cannot be frozen: {type(model).__name__} has {len(stack.layers)}; freeze at most "
                            "that many")
    for module in (model.get_input_embeddings(), *stack.layers[:count]):
        module.requires_grad_(False)
