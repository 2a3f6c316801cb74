"""Mixtures of experts: what of them is not captured."""
from __future__ import annotations

from typing import Any

from torch import nn

from megacompile.errors import UnsupportedError


def refuse_router_losses(model: nn.Module) -> None:
    """Raises `UnsupportedError` if a model of transformers would add its routers' auxiliary loss. That is a product of means
    over all tokens of a batch and all layers: no sum over micro-batches, and no output of a layer."""
    config: Any = getattr(model, "config", None)
    nested = [config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))] if config is not None else []
    if any(getattr(each, "output_router_logits", False) is True for each in nested):
        raise UnsupportedError(
            f"{type(model).__name__} is to add its routers' auxiliary loss (config.output_router_logits), which is made of all "
            "layers' and all tokens' router logits at once and cannot be streamed yet: set config.output_router_logits=False")
