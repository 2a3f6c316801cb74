"""The one autograd function: a loss or a head's outputs, whose backward runs the schedule.

It is anchored on a dummy scalar, since the runtime writes parameters' gradients itself. The parameters are inputs too, so that
autograd knows that the results depend on them, and a request for their gradients reaches us and is refused.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.compat.core import graph_is_kept, node_will_run
from megacompile.compat.module_hooks import hooks_of
from megacompile.errors import LeaseError, UnsupportedError
from megacompile.frontend.tracing.fake_model import asks_for_gradients, collects_outputs
from megacompile.streaming.open_forward import OpenForward
from megacompile.streaming.streamed import Streamed


class StreamedResults(torch.autograd.Function):
    """A loss, or a head's outputs. Their gradient function holds the open forward, which dies with the graph.

    `anchor` is not a leaf: autograd computes its gradient in every `backward()`, but not when only the gradients of other
    tensors are asked for. `has_gradient` says which of `results` get a gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, results: tuple[Tensor, ...], has_gradient: tuple[bool, ...], streamed: Streamed,
                forward: OpenForward, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.streamed, ctx.forward, ctx.anchor, ctx.has_gradient = streamed, forward, anchor.grad_fn, has_gradient
        ctx.mark_non_differentiable(*itertools.compress(results, [not each for each in has_gradient]))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise LeaseError("create_graph=True (double backward) is not supported, since a streamed backward builds no graph: "
                             "leave it out")
        if graph_is_kept():
            raise LeaseError("retain_graph=True is not supported, since the backward frees activations as it runs: "
                             "run the forward once for each backward")
        if not node_will_run(ctx.anchor):
            raise LeaseError("gradients of single parameters are not supported (torch.autograd.grad, backward(inputs=...)): "
                             "a streamed backward computes all of them; call loss.backward() and read .grad")
        streamed: Streamed = ctx.streamed
        refuse_hooks(streamed.model)
        with streamed.call_lock:
            streamed.backward(ctx.forward, tuple(itertools.compress(gradients, ctx.has_gradient)))
        return (None,) * len(ctx.needs_input_grad)


def refuse_hooks(model: nn.Module, also_of_whole: bool = False) -> None:
    """Raises `UnsupportedError` if a parameter or a module inside the model has hooks, since streamed calls run none.
    `also_of_whole`: also for hooks of the model as a whole, which run only when the model itself is called."""
    for name, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if parameter is not None and (parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)):
                raise UnsupportedError(f"{f'{name}.{own}'.lstrip('.')} has a gradient hook, which a streamed backward does not "
                                       "call: remove it, and read .grad after backward()")
        if module is not model and _has_hooks(module):
            raise UnsupportedError(f"{name} has a hook, which a streamed model does not call: remove it "
                                   "(hooks of the model as a whole work)")
    if also_of_whole and _has_hooks(model):
        raise UnsupportedError("the model has a hook, which only a call of the model runs: remove it, or call the "
                               "model itself")


def _has_hooks(module: nn.Module) -> bool:
    return any(_has_effect(hook) for hook in hooks_of(module))


def _has_effect(hook: Callable[..., Any]) -> bool:
    """True if a module's hook does anything. transformers leaves its hooks in place after a request for hidden states. They
    collect only while a transformers model is asked again."""
    return not collects_outputs(hook) and not asks_for_gradients(hook)
