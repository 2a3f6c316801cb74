"""The one autograd function: a loss whose backward runs the schedule. Anchored on a dummy scalar, since parameters stream."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacompile.errors import LeaseError
from megacompile.streamed import Lease, Streamed


class StreamedLoss(torch.autograd.Function):
    """loss, with a gradient function that needs its lease. The lease dies with the graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, streamed: Streamed, lease: Lease) -> Tensor:
        ctx.streamed, ctx.lease = streamed, lease
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise LeaseError("create_graph=True (double backward) cannot be honoured: a streamed backward leaves no graph")
        if torch._C._autograd._get_current_graph_task_keep_graph():
            raise LeaseError("retain_graph=True cannot be honoured: activations are freed as the backward goes; "
                             "run the forward once for each backward")
        streamed: Streamed = ctx.streamed
        refuse_hooks(streamed)
        streamed.backward(ctx.lease, gradients[0])
        return None, None, None, None


class LogitsWithoutLoss(torch.autograd.Function):
    """Logits of a forward without labels. Their backward is refused with the reason, not ignored."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, logits: Tensor) -> Tensor:
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise LeaseError("logits of a streamed model carry no gradient yet: pass labels to the model and use its loss")


def refuse_hooks(streamed: Streamed) -> None:
    """Raises `LeaseError` if a parameter has hooks, which nothing would call."""
    for name, parameter in streamed.parameters.items():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise LeaseError(f"{name} has a gradient hook, which a streamed backward does not call: remove it, "
                             "or read .grad after backward()")
