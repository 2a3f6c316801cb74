"""Hooks by which models of transformers collect values on their way: routers' logits, an encoder's hidden states."""
from __future__ import annotations

from typing import Any

from torch import nn

from megacompile.frontend.layers import LayerStack, encoders


def install_recorders(model: nn.Module, stack: LayerStack) -> None:
    """Puts the hooks into the modules of a model that will collect something: encoders, and a decoder that is to add its
    routers' auxiliary loss (`config.output_router_logits`). transformers would do so in the first forward, under a lock, which
    Dynamo cannot follow."""
    beside = {id(module) for module in encoders(model, stack)}
    for module in model.modules():  # from the outside in, as forwards go
        routers = getattr(getattr(module, "config", None), "output_router_logits", False) is True
        if (routers or id(module) in beside) and _collects(module):
            from transformers.utils.output_capturing import maybe_install_capturing_hooks

            maybe_install_capturing_hooks(module)  # type: ignore[arg-type]


def _collects(module: nn.Module) -> bool:
    """Whether transformers' decorator `capture_outputs` is around a module's forward."""
    forward: Any = type(module).forward
    while forward is not None:
        if getattr(forward, "__globals__", {}).get("__name__") == "transformers.utils.output_capturing":
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False
