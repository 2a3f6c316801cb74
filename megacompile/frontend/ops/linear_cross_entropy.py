"""Head and cross entropy as one op over chunks of tokens, whose forward computes the gradients as well.

With a vocabulary of 150k, logits are a micro-batch's largest tensor by far. A chunk's logits are enough: the loss is a
sum over tokens, and the gradient of a chunk's logits depends on that chunk alone. Forward and backward together run
the head's GEMM once.

Tokens without a target, such as prompts and padding, add nothing. If enough tokens have none, chunks are made of the others.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacompile.codegen.inductor import Inductor
from megacompile.compat.core import FakeTensorMode, enable_python_dispatcher, make_fx
from megacompile.compat.symbols import ShapeEnv
from megacompile.frontend.templates.symbolic_sizes import UNIT, CodeForAnySize, SymbolicSizes
from megacompile.frontend.templates.template import BATCH
from megacompile.frontend.templates.variants import Traced, code_for_any_size
from megacompile.ir.token_loop import accumulate_product, targets_first

#: If tokens are left out, the number of the others is rounded up to a multiple of this. So there are few sizes of a last chunk.
_MULTIPLE = 128


def _linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, loss_denominator: Tensor, ignore_index: int,
    scale: float, softcap: float, chunk: int, needs_weight_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """sum over tokens of -log softmax(y)[target], / loss_denominator, where y = capped(scale * (hidden @ weight.T + bias)).

    hidden [N, D]; weight [V, D]; bias [V] or None; targets int64 [N], where `ignore_index` counts nothing; loss_denominator
    float32 []; softcap 0 for none; chunk, tokens at a time. The softmax is computed in float32.
    Returns the loss, float32 [], and the gradients for a unit loss: of hidden, [N, D] in its dtype; of weight, float32
    [V, D], accumulated in float32 over chunks; of bias, float32 [V]; empty where not needed.
    """
    chosen = _with_targets(targets, ignore_index)
    loss = hidden.new_zeros((), dtype=torch.float32)
    grad_hidden = (torch.empty_like if chosen is None else torch.zeros_like)(hidden, memory_format=torch.contiguous_format)
    grad_weight = loss.new_zeros(weight.shape if needs_weight_gradient else (0,))
    grad_bias = loss.new_zeros(weight.shape[:1] if bias is not None else (0,))
    for start in range(0, hidden.shape[0] if chosen is None else chosen.shape[0], chunk):
        here = slice(start, start + chunk) if chosen is None else chosen[start:start + chunk]
        piece, target = hidden[here], targets[here]
        counts = target != ignore_index
        factor = torch.where(counts, 1 / loss_denominator, 0.0)
        scores = F.linear(piece, weight, bias)
        known = torch.where(counts, target, 0)
        if hidden.is_cuda:
            fused = _fused_chunk_gradient(scores.shape[0], chunk, scores.shape[1], scores.dtype, scores.device, scale, softcap)
            chunk_loss, grad = fused(scores, known, factor)
        else:
            chunk_loss, grad = _chunk_gradient(scores, known, factor, scale, softcap)
        loss += chunk_loss
        if bias is not None:
            grad_bias += grad.sum(0, dtype=torch.float32)
        if needs_weight_gradient:
            accumulate_product(grad_weight, grad.t(), piece)
        if chosen is None:
            torch.mm(grad, weight, out=grad_hidden[here])
        else:
            grad_hidden[here] = torch.mm(grad, weight, out=piece)
    # Without any token that counts this is 0 / 0, NaN, and the gradients are 0, as in native training.
    return loss / loss_denominator, grad_hidden, grad_weight, grad_bias


def _with_targets(targets: Tensor, ignore_index: int) -> Tensor | None:
    """The positions of the tokens to compute, int64 [n]: those with a target, and a few more. None for all tokens."""
    if (first := targets_first(targets, ignore_index)) is None:
        return None
    order, known = first
    return order[:-(-known // _MULTIPLE) * _MULTIPLE]


def _chunk_gradient(
    scores: Tensor, target: Tensor, factor: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """The sum of the losses of a chunk's tokens that count, and the gradient of the losses weighted by factor, with
    respect to scores and in their dtype.

    scores [n, V]; target int64 [n]; factor float32 [n]: zero for tokens that do not count."""
    logits = scores.float()
    if scale != 1.0:
        logits = logits * scale
    capped = torch.tanh(logits / softcap) if softcap else None
    if capped is not None:
        logits = capped * softcap
    log_probabilities = torch.log_softmax(logits, 1)
    loss = -torch.where(factor != 0, log_probabilities.gather(1, target[:, None])[:, 0], 0.0).sum()
    is_target = torch.arange(scores.shape[1], device=scores.device)[None, :] == target[:, None]
    grad = (log_probabilities.exp() - is_target.float()) * factor[:, None]
    if capped is not None:
        grad = grad * (1 - capped * capped)
    if scale != 1.0:
        grad = grad * scale
    return loss, grad.to(scores.dtype)


@functools.lru_cache(maxsize=256)
def _fused_chunk_gradient(
    rows: int, chunk: int, vocabulary: int, dtype: torch.dtype, device: torch.device, scale: float, softcap: float
) -> Callable[..., tuple[Tensor, Tensor]]:
    """`_chunk_gradient` of scores, target and factor, in one kernel: op by op, a vocabulary's worth of float32 would cross
    the device's memory a dozen times. Only a last chunk has fewer rows than `chunk`. Its code is for any number of rows, since
    micro-batches of packed rows leave many different ones, and each compilation would stop a step for seconds."""
    if 1 < rows < chunk:
        code = _compiled_for_any_rows(max(2, chunk // 2), vocabulary, dtype, device, scale, softcap)
        if code is not None and (made := code.of(rows, UNIT)) is not None:
            return made
    with FakeTensorMode(shape_env=ShapeEnv()):
        examples = _examples(rows, vocabulary, dtype, device)
        graph = make_fx(functools.partial(_chunk_gradient, scale=scale, softcap=softcap))(*examples)
    return Inductor().compile(graph, examples)


@functools.lru_cache(maxsize=64)
def _compiled_for_any_rows(usual: int, vocabulary: int, dtype: torch.dtype, device: torch.device, scale: float,
                           softcap: float) -> CodeForAnySize | None:
    """`_chunk_gradient`, compiled for any number of rows from 2 on. Inductor chooses kernels for `usual` ones. Rows have no
    length here, so the code is for rows of one unit. Returns None if inductor cannot compile it with a symbol, or if the code
    holds for one number only."""
    sizes = SymbolicSizes(usual, UNIT, (BATCH,))
    (number,) = sizes.numbers
    assert isinstance(number, torch.SymInt), f"{usual} rows are not a symbol"

    with sizes.fakes, torch.no_grad(), enable_python_dispatcher():
        # An input of its own: inductor's cache keeps only conditions on symbols that are inputs.
        examples: list[Tensor | torch.SymInt] = [number, *_examples(number, vocabulary, dtype, device)]
        # Without annotations: inductor's cache refuses graphs of functions that have them.
        graph = make_fx(lambda _, scores, target, factor: _chunk_gradient(scores, target, factor, scale, softcap),
                        tracing_mode="real")(*examples)
    return code_for_any_size(Traced(graph, examples, (0, 1, 2)), sizes, Inductor())


def _examples(rows: int | torch.SymInt, vocabulary: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    return [torch.empty(rows, vocabulary, dtype=dtype, device=device),
            torch.empty(rows, dtype=torch.int64, device=device), torch.empty(rows, device=device)]


def _linear_cross_entropy_fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, loss_denominator: Tensor, ignore_index: int,
    scale: float, softcap: float, chunk: int, needs_weight_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def empty(*shape: int | torch.SymInt) -> Tensor:
        return hidden.new_empty(shape, dtype=torch.float32)

    weights = weight.shape if needs_weight_gradient else (0,)
    biases = weight.shape[:1] if bias is not None else (0,)
    return empty(), hidden.new_empty(hidden.shape), empty(*weights), empty(*biases)


linear_cross_entropy = torch.library.custom_op(
    "megacompile::linear_cross_entropy", _linear_cross_entropy, mutates_args=(), schema=(
        "(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor loss_denominator, int ignore_index, "
        "float scale, float softcap, int chunk, bool needs_weight_gradient) -> (Tensor, Tensor, Tensor, Tensor)"))
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
