"""Lion (Chen et al., "Symbolic discovery of optimization algorithms", 2023): steps of equal size, in the sign of a mean of
gradients.

It keeps one moment, and so half of AdamW's state. Its authors use a learning rate of a third to a tenth of AdamW's, and a
weight decay as many times larger.
"""
from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from megacompile.runtime.optimizer.rule import Moment, Rule
from megacompile.streaming.optimizer.hyper_parameters import NON_NEGATIVE, TWO_BETAS, Check
from megacompile.streaming.optimizer.optimizer import StreamedOptimizer


@dataclass(frozen=True)
class Options:
    """The options of one group at one step."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float


def _values(options: Options, step: int) -> tuple[float, ...]:
    del step  # nothing is corrected for the first steps
    return 1 - options.lr * options.weight_decay, options.lr, 1 - options.beta1, 1 - options.beta2


def _reference(master: Tensor, gradient: Tensor, moments: list[Tensor], options: Options, step: int) -> None:
    del step
    (m,) = moments
    direction = torch.lerp(m, gradient, 1 - options.beta1)
    master.mul_(1 - options.lr * options.weight_decay).add_(direction.sign(), alpha=-options.lr)
    m.lerp_(gradient, 1 - options.beta2)


RULE = Rule(
    name="lion",
    moments=(Moment("exp_avg", signed=True),),
    scalars=("decay", "lr", "step_weight", "moment_weight"),
    # torch.lerp starts from its nearer end.
    code="""\
  const Exact g(gradient), old(moments[0]);
  const bool step_from_moment = s.step_weight < 0.5f, from_moment = s.moment_weight < 0.5f;
  const float direction = VALUE(FMA(Exact(step_from_moment ? s.step_weight : s.step_weight - 1.0f), g - old,
                                    step_from_moment ? old : g));
  const uint32_t bits = BITS(direction);
  const bool is_zero = (bits & 0x7FFFFFFFu) == 0u, is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  const float sign = is_zero || is_nan ? direction : FLOAT((bits & 0x80000000u) | 0x3F800000u);
  moments[0] = VALUE(FMA(Exact(from_moment ? s.moment_weight : s.moment_weight - 1.0f), g - old, from_moment ? old : g));
  master = VALUE(FMA(Exact(-s.lr), Exact(sign), Exact(master) * Exact(s.decay)));""",
    values=_values, reference=_reference)


class Lion(StreamedOptimizer):
    """Lion for streamed models. `StreamedOptimizer` describes the other arguments and the behavior."""

    rule: ClassVar[Rule] = RULE
    checks: ClassVar[Mapping[str, Check]] = {"lr": NON_NEGATIVE, "betas": TWO_BETAS, "weight_decay": NON_NEGATIVE}

    def __init__(self, params: Iterable[Any], lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99),
                 weight_decay: float = 0.0, *, state_dtype: str = "float32", master: str = "float32",
                 max_grad_norm: float | None = None, update: str = "step", non_finite: str = "raise",
                 dump_folder: str | os.PathLike[str] = "non-finite", overlap: str | None = None) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay), state_dtype=state_dtype, master=master,
                         max_grad_norm=max_grad_norm, update=update, overlap=overlap, non_finite=non_finite,
                         dump_folder=dump_folder)

    def options_of(self, group: Mapping[str, Any]) -> Options:
        beta1, beta2 = map(float, group["betas"])
        return Options(float(group["lr"]), beta1, beta2, float(group["weight_decay"]))
