"""Head and cross entropy as one op over chunks of tokens, whose forward computes the gradients as well.

The logits of a micro-batch of a 150k vocabulary are its largest tensor by far. A chunk's logits are enough: the loss is a
sum over tokens, and the gradient with respect to a chunk's logits depends on that chunk alone. Forward and backward
together read the head twice and never run its GEMM a second time.
"""
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, normaliser: Tensor, ignore_index: int,
    scale: float, softcap: float, chunk: int, needs_weight_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """sum over tokens of -log softmax(y)[target], / normaliser, where y = capped(scale * (hidden @ weight.T + bias)).

    hidden [N, D]; weight [V, D]; bias [V] or None; targets int64 [N], where `ignore_index` counts nothing; normaliser
    float32 []; softcap 0 for none; chunk, tokens at a time. The softmax is computed in float32.
    Returns the loss, float32 [], and the gradients for a unit loss: of hidden, [N, D] in its dtype; of weight, float32
    [V, D], accumulated in float32 over chunks; of bias, float32 [V]; empty where not needed.
    """
    options = {"dtype": torch.float32, "device": hidden.device}
    loss = torch.zeros((), **options)  # type: ignore[arg-type]
    grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    grad_weight = torch.zeros(weight.shape if needs_weight_gradient else (0,), **options)  # type: ignore[arg-type]
    grad_bias = torch.zeros(weight.shape[:1] if bias is not None else (0,), **options)  # type: ignore[arg-type]
    for start in range(0, hidden.shape[0], chunk):
        piece, target = hidden[start:start + chunk], targets[start:start + chunk]
        scores = F.linear(piece, weight, bias).float()
        if scale != 1.0:
            scores.mul_(scale)
        capped = scores.div_(softcap).tanh_() if softcap else None
        if capped is not None:
            scores = capped * softcap
        counts = target != ignore_index
        index = torch.where(counts, target, 0)[:, None]
        logsumexp = scores.logsumexp(1)
        loss += torch.where(counts, logsumexp - scores.gather(1, index)[:, 0], 0.0).sum()
        # softmax - one_hot, over the normaliser, and zero where the target does not count.
        grad = scores.sub_(logsumexp[:, None]).exp_()
        grad.scatter_add_(1, index, torch.full_like(index, -1.0, dtype=torch.float32))
        grad.mul_(counts[:, None]).div_(normaliser)
        if capped is not None:
            grad.mul_(1 - capped.square_())
        if scale != 1.0:
            grad.mul_(scale)
        if bias is not None:
            grad_bias += grad.sum(0)
        grad = grad.to(hidden.dtype)
        torch.mm(grad, weight, out=grad_hidden[start:start + chunk])
        if needs_weight_gradient:
            _accumulate(grad_weight, grad.t(), piece)
    return loss / normaliser, grad_hidden, grad_weight, grad_bias


def _accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in float32: inside the GEMM where the device has one of mixed precision."""
    if a.dtype is torch.float32:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


def _linear_cross_entropy_fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, normaliser: Tensor, ignore_index: int,
    scale: float, softcap: float, chunk: int, needs_weight_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def empty(*shape: int | torch.SymInt) -> Tensor:
        return hidden.new_empty(shape, dtype=torch.float32)  # type: ignore[arg-type]

    return (empty(), hidden.new_empty(hidden.shape), empty(*(weight.shape if needs_weight_gradient else (0,))),
            empty(weight.shape[0] if bias is not None else 0))


linear_cross_entropy = torch.library.custom_op(
    "megacompile::linear_cross_entropy", _linear_cross_entropy, mutates_args=(), schema=(
        "(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor normaliser, int ignore_index, float scale, "
        "float softcap, int chunk, bool needs_weight_gradient) -> (Tensor, Tensor, Tensor, Tensor)"))
linear_cross_entropy.register_fake(_linear_cross_entropy_fake)


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.has_bias, ctx.needs_weight_gradient = inputs[2] is not None, inputs[9]
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _scale_gradients(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
    return (grad_hidden * grad_loss, grad_weight * grad_loss if ctx.needs_weight_gradient else None,
            grad_bias * grad_loss if ctx.has_bias else None, *[None] * 7)


linear_cross_entropy.register_autograd(_scale_gradients, setup_context=_save_gradients)
