"""Hooks of a model that is traced: transformers' own that collect values (router logits, an encoder's hidden states), those
that make embeddings' outputs require a gradient, and the user's of the model as a whole."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from megacompile.compat.core import pytree
from megacompile.compat.module_hooks import HOOKS
from megacompile.frontend.tracing.layers import LayerStack, encoders

ROUTERS = "router_logits"


def install_recorders(model: nn.Module, stack: LayerStack) -> None:
    """Installs the collecting hooks in the modules of a model that will collect something: encoders, and a decoder that adds
    its routers' auxiliary loss (`config.output_router_logits`). transformers would install them in the first forward, under a
    lock, which Dynamo cannot follow."""
    beside = {id(module) for module in encoders(model, stack)}
    for module in model.modules():  # from the outside in, as forwards run
        routers = getattr(getattr(module, "config", None), f"output_{ROUTERS}", False) is True
        if (routers or id(module) in beside) and _collects(module):
            from transformers.utils.output_capturing import maybe_install_capturing_hooks

            maybe_install_capturing_hooks(module)  # type: ignore[arg-type]
    for module in model.modules():
        for key, hook in module._forward_hooks.items():
            if _records_routers(hook):
                module._forward_hooks[key] = functools.partial(_record_copies, hook)


def remove_hooks_for_gradients(model: nn.Module) -> None:
    """Removes the hooks that make embeddings' outputs require a gradient."""
    for module in model.modules():
        for key in [key for key, hook in module._forward_hooks.items() if asks_for_gradients(hook)]:
            del module._forward_hooks[key]


def remove_hooks_of_whole(model: nn.Module) -> None:
    """Removes the hooks of a model as a whole: a call of the streamed model runs them, so its graph must not. Those with which
    transformers collects outputs belong to the model's own forward, and stay."""
    for hooks in (getattr(model, name) for name in HOOKS):
        for key in [key for key, hook in hooks.items() if not collects_outputs(hook)]:
            del hooks[key]


def collects_outputs(hook: Any) -> bool:
    """Whether a forward hook is transformers' own, which collects a module's outputs."""
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"


def asks_for_gradients(hook: Any) -> bool:
    """Whether a forward hook is the one that `enable_input_require_grads` of transformers or PEFT installs, as
    `gradient_checkpointing_enable` does. torch.utils.checkpoint needs it above frozen embeddings. The recomputation of
    streamed layers does not, and no gradient of a parameter depends on it."""
    return "make_inputs_require_grad" in getattr(hook, "__qualname__", "")


def _collects(module: nn.Module) -> bool:
    """Whether transformers' decorator `capture_outputs` is around a module's forward."""
    forward: Any = type(module).forward
    while forward is not None:
        if getattr(forward, "__globals__", {}).get("__name__") == "transformers.utils.output_capturing":
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def _records_routers(hook: Any) -> bool:
    """Whether a forward hook is transformers' own that collects router logits, recognized by their name in its closure."""
    return any(cell.cell_contents == ROUTERS for cell in getattr(hook, "__closure__", None) or ())


def _record_copies(hook: Callable[..., None], module: nn.Module, args: Any, output: Any) -> None:
    """Calls `hook` with copies. Dynamo does not record a value that shares memory with another value of the layer, and in
    float32 a router's `logits.float()` is the tensor `logits` itself."""
    hook(module, args, pytree.tree_map_only(Tensor, Tensor.clone, output))
