"""Mixtures of experts: how a model's layers hand their routers' logits to its auxiliary loss."""
from __future__ import annotations

from typing import Any

from torch import nn


def record_router_logits(model: nn.Module) -> None:
    """Puts transformers' own hooks into a model that is to add its routers' auxiliary loss (`config.output_router_logits`).
    transformers would do so in the first forward, under a lock, which Dynamo cannot follow."""
    if not any(getattr(getattr(each, "config", None), "output_router_logits", False) is True for each in model.modules()):
        return
    from transformers.utils import output_capturing

    hooked: list[Any] = []
    for each in reversed(list(model.modules())):  # the innermost is the one that records; those around it would do so again
        records = getattr(each, "_can_record_outputs", None) or {}
        if "router_logits" in records and not any(inner in hooked for inner in each.modules()):
            output_capturing.maybe_install_capturing_hooks(each)  # type: ignore[arg-type]
            hooked.append(each)
