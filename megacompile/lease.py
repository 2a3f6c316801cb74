"""The one autograd function: a loss whose backward runs the schedule.

It is anchored on a dummy scalar, since the runtime itself writes parameters' gradients. The parameters are its inputs all the
same, so that autograd knows that the loss depends on them, and a request for their gradients reaches us and is refused.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megacompile.errors import LeaseError, UnsupportedError
from megacompile.streamed import Lease, Streamed

_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class StreamedLoss(torch.autograd.Function):
    """loss, with a gradient function that needs its lease. The lease dies with the graph.

    `anchor` is no leaf: autograd computes its gradient in every `backward()`, and in none that asks for others' alone."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, streamed: Streamed, lease: Lease, *parameters: Tensor) -> Tensor:
        ctx.streamed, ctx.lease, ctx.anchor = streamed, lease, anchor.grad_fn
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise LeaseError("create_graph=True (double backward) cannot be honoured: a streamed backward leaves no graph")
        if torch._C._autograd._get_current_graph_task_keep_graph():
            raise LeaseError("retain_graph=True cannot be honoured: activations are freed as the backward goes; "
                             "run the forward once for each backward")
        if not torch._C._will_engine_execute_node(ctx.anchor):
            raise LeaseError("gradients of single parameters cannot be honoured (torch.autograd.grad, backward(inputs=...)): "
                             "a streamed backward makes all of them; call loss.backward() and read .grad")
        streamed: Streamed = ctx.streamed
        refuse_hooks(streamed.model)
        streamed.backward(ctx.lease, gradients[0])
        return (None,) * len(ctx.needs_input_grad)


class LogitsWithoutLoss(torch.autograd.Function):
    """Logits of a forward without labels. Their backward is refused with the reason, not ignored."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, logits: Tensor) -> Tensor:
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise LeaseError("logits of a streamed model carry no gradient yet: pass labels to the model and use its loss")


def refuse_hooks(model: nn.Module) -> None:
    """Raises `UnsupportedError` if a parameter or a module inside the model has hooks, which nothing would call."""
    for name, parameter in nn.Module.named_parameters(model):
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UnsupportedError(f"{name} has a gradient hook, which a streamed backward does not call: remove it, "
                                   "and read .grad after backward()")
    for name, module in model.named_modules():
        if module is not model and any(getattr(module, hooks) for hooks in _MODULE_HOOKS):
            raise UnsupportedError(f"{name} has a hook, which a streamed model does not call: remove it "
                                   "(hooks of the model as a whole work)")
