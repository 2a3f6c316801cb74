"""What an open forward holds, and the one autograd function: results whose backward runs the schedule.

It is anchored on a dummy scalar, since the runtime itself writes parameters' gradients. The parameters are its inputs all the
same, so that autograd knows that the results depend on them, and a request for their gradients reaches us and is refused.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megacompile.errors import LeaseError, UnsupportedError
from megacompile.frontend.tracing.recorders import asks_for_gradients
from megacompile.runtime.kernels import Activation, Batch
from megacompile.runtime.memory.arena import Accumulators
from megacompile.runtime.memory.checkpoints import HostCheckpoint

if TYPE_CHECKING:
    from megacompile.streaming.shapes import CompiledShape
    from megacompile.streaming.streamed import Streamed

_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(eq=False)
class Lease:
    """What an open forward holds: kept activations, the epilogue's gradients, which weights they were made with, and buffers
    in host memory, by slot, for the checkpoints that are there."""

    shape: CompiledShape
    batch: Batch
    version: int
    values: dict[str, Any] = field(default_factory=dict)
    host: Mapping[str, HostCheckpoint] = field(default_factory=dict)
    give_back: Callable[[], object] = lambda: None  # the buffers; happens when the lease dies at the latest
    closed: bool = False

    def end(self) -> None:
        """After its backward: nothing is held any more."""
        self.values.clear()
        self.batch.output_gradients = ()  # of logits, gigabytes: the batch itself is kept until the update, for a dump
        self.give_back()

    @property
    def device_bytes(self) -> int:
        """Device memory that it keeps from others; memory that several values share counts once."""
        tensors: list[Any] = []
        for value in self.values.values():
            if isinstance(value, Activation):
                tensors += [*value.outputs, *value.residuals]
            elif isinstance(value, Accumulators):
                tensors.append(value.flat)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor)}
        return sum(storages.values())


class StreamedResults(torch.autograd.Function):
    """A loss, or a head's outputs, with a gradient function that needs its lease. The lease dies with the graph.

    `anchor` is no leaf: autograd computes its gradient in every `backward()`, and in none that asks for others' alone. Of
    `results`, which nobody else has, those whose place in `has_gradient` is True get a gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, results: tuple[Tensor, ...], has_gradient: tuple[bool, ...], streamed: Streamed,
                lease: Lease, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.streamed, ctx.lease, ctx.anchor, ctx.has_gradient = streamed, lease, anchor.grad_fn, has_gradient
        ctx.mark_non_differentiable(*itertools.compress(results, [not each for each in has_gradient]))
        return results

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
        with streamed.turn:
            streamed.backward(ctx.lease, tuple(itertools.compress(gradients, ctx.has_gradient)))
        return (None,) * len(ctx.needs_input_grad)


def refuse_hooks(model: nn.Module) -> None:
    """Raises `UnsupportedError` if a parameter or a module inside the model has hooks, which nothing would call."""
    for name, parameter in nn.Module.named_parameters(model):
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UnsupportedError(f"{name} has a gradient hook, which a streamed backward does not call: remove it, "
                                   "and read .grad after backward()")
    for name, module in model.named_modules():
        if module is not model and any(_acts(hook) for hooks in _MODULE_HOOKS for hook in getattr(module, hooks).values()):
            raise UnsupportedError(f"{name} has a hook, which a streamed model does not call: remove it "
                                   "(hooks of the model as a whole work)")


def _acts(hook: Callable[..., Any]) -> bool:
    """Whether a module's hook does anything. transformers leaves hooks behind once it was asked for hidden states, which
    collect them only while a model of its own is asked again."""
    return getattr(hook, "__module__", "") != "transformers.utils.output_capturing" and not asks_for_gradients(hook)
