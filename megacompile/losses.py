"""Per-token functions for losses that are computed outside of the model.

    targets = next_tokens(labels)
    chosen = model.megacompile.per_token(log_probabilities, {"input_ids": ids}, targets=targets).sum(1)
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

#: Label of positions that a loss ignores, as in `torch.nn.functional.cross_entropy`.
IGNORED = -100


Function = TypeVar("Function", bound=Callable[..., Any])


def zero_where_ignored(function: Function) -> Function:
    """Declares that all values of a function of tokens are 0 where `targets` is `IGNORED`, and have no gradient there. Then
    these tokens need not be computed."""
    function.zero_where_ignored = True  # type: ignore[attr-defined]
    return function


def leaves_out_ignored(function: Callable[..., Any]) -> bool:
    """True if a function, or what `functools.partial` has wrapped, is declared `zero_where_ignored`."""
    wrapped = isinstance(function, functools.partial) and leaves_out_ignored(function.func)
    return wrapped or getattr(function, "zero_where_ignored", False)


def next_tokens(labels: Tensor) -> Tensor:
    """The target of each position, [B, T]: the label of the next position, and `IGNORED` at the last one."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


@zero_where_ignored
def log_probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    """The log-probability of each token's target, float32 [N]; 0 where the target is `IGNORED`. `logits`: [N, V]; `targets`:
    int64 [N]."""
    return -F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="none")


@zero_where_ignored
def log_probabilities_and_entropies(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """`log_probabilities`, and the entropy of each token's distribution; both are float32 [N], and 0 where the target is
    `IGNORED`. Both are differentiable."""
    log_probs, entropies = _LogProbabilitiesAndEntropies.apply(logits.float(), targets)
    ignored = targets == IGNORED
    return log_probs.masked_fill(ignored, 0), entropies.masked_fill(ignored, 0)


class _LogProbabilitiesAndEntropies(torch.autograd.Function):
    """PyTorch differentiates a `gather` by adding to a tensor of zeros, and `log_softmax` by a sum over the vocabulary. As
    formulas both gradients are elementwise, so that a compiler reads the logits twice forward and once backward, and stores
    nothing of their size."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        largest = scores.amax(-1, keepdim=True)
        below = scores - largest
        exponentials = below.exp()
        sums = exponentials.sum(-1)
        logarithms = sums.log()
        entropies = logarithms - (exponentials * below).sum(-1) / sums
        ctx.save_for_backward(scores, largest, logarithms, entropies, targets)
        ctx.set_materialize_grads(False)
        of_targets = scores.gather(-1, targets.clamp(min=0)[:, None])
        return (of_targets - largest)[:, 0] - logarithms, entropies

    @staticmethod
    def backward(ctx: Any, of_log_probs: Tensor | None, of_entropies: Tensor | None) -> tuple[Tensor | None, None]:
        scores, largest, logarithms, entropies, targets = ctx.saved_tensors
        known = (scores - largest) - logarithms[:, None]
        probabilities, gradient = known.exp(), None
        if of_log_probs is not None:
            is_target = torch.arange(known.shape[-1], device=known.device) == targets.clamp(min=0)[:, None]
            gradient = (is_target.to(known.dtype) - probabilities) * of_log_probs[:, None]
        if of_entropies is not None:
            other = -probabilities * (known + entropies[:, None]) * of_entropies[:, None]
            gradient = other if gradient is None else gradient + other
        return gradient, None
