"""AdamW: `torch.optim.AdamW`, operation by operation and rounding by rounding."""
from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

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
    eps: float
    weight_decay: float


def _values(options: Options, step: int) -> tuple[float, ...]:
    """The scalars of torch.optim.AdamW, computed in double precision, each rounded once."""
    root_correction = ctypes.c_float((1 - options.beta2**step) ** 0.5).value
    inverse = ctypes.c_float(1 / root_correction).value
    return (1 - options.lr * options.weight_decay, 1 - options.beta1, options.beta2, 1 - options.beta2, root_correction,
            inverse, 1 / root_correction - inverse, options.eps, -options.lr / (1 - options.beta1**step))


def _reference(master: Tensor, gradient: Tensor, moments: list[Tensor], options: Options, step: int) -> None:
    m, v = moments
    m.lerp_(gradient, 1 - options.beta1)
    v.mul_(options.beta2).addcmul_(gradient, gradient, value=1 - options.beta2)
    master.mul_(1 - options.lr * options.weight_decay)
    # PyTorch with MKL has an FP32 sqrt that is often 1 ulp off; the double-precision sqrt, rounded, equals the kernels'.
    root_correction = float((1 - options.beta2**step) ** 0.5)
    denominator = v.double().sqrt_().float().div_(root_correction).add_(options.eps)
    master.addcdiv_(m, denominator, value=-options.lr / (1 - options.beta1**step))


RULE = Rule(
    name="adamw",
    moments=(Moment("exp_avg", signed=True), Moment("exp_avg_sq", signed=False)),
    # inverse, rest: 1 / root_correction, rounded, and what the rounding left out, rounded
    scalars=("decay", "gradient_weight", "beta2", "square_weight", "root_correction", "inverse", "rest", "eps",
             "negative_step"),
    # In torch's order and with its roundings: torch's lerp and addcmul are fused multiply-adds on every processor that has
    # them, so these are too. torch.lerp starts from its nearer end, so that a weight of 1 gives the gradient exactly.
    code="""\
  const bool from_moment = s.gradient_weight < 0.5f;
  const float lerp_weight = from_moment ? s.gradient_weight : s.gradient_weight - 1.0f;
  const Exact g(gradient), old_first(moments[0]), old_second(moments[1]);
  const Exact m = FMA(Exact(lerp_weight), g - old_first, from_moment ? old_first : g);
  const Exact v = FMA(Exact(s.square_weight) * g, g, old_second * Exact(s.beta2));
  const Exact denominator = over_root_correction(SQRT(v), s) + Exact(s.eps);
  moments[0] = VALUE(m);
  moments[1] = VALUE(v);
  master = VALUE(Exact(master) * Exact(s.decay) + (Exact(s.negative_step) * m) / denominator);""",
    functions="""\
// root / s.root_correction, with the bits of a division. Divisions are not pipelined; multiplications and additions are.
// The first quotient is at most a hair more than half a unit off, so that its remainder is exact, and adding the remainder
// over the divisor rounds correctly (Markstein, IBM J. Res. Dev. 34, 1990). Roots do not underflow.
INLINE Exact over_root_correction(Exact root, const Scalars& s) {
  const Exact near = FMA(root, Exact(s.inverse), root * Exact(s.rest));
  const Exact remainder = FMA(Exact(-s.root_correction), near, root);
  const Exact quotient = FMA(remainder, Exact(s.inverse), near);
  return VALUE(root) <= kLargest ? quotient : root;  // inf and NaN stay
}
""",
    values=_values, reference=_reference)


class AdamW(StreamedOptimizer):
    """`torch.optim.AdamW` for streamed models. `StreamedOptimizer` describes the other arguments and the behavior."""

    rule: ClassVar[Rule] = RULE
    checks: ClassVar[Mapping[str, Check]] = {
        "lr": NON_NEGATIVE, "betas": TWO_BETAS, "eps": NON_NEGATIVE, "weight_decay": NON_NEGATIVE}

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 1e-2, *, state_dtype: str = "float32", master: str = "float32",
                 max_grad_norm: float | None = None, update: str = "step", non_finite: str = "raise",
                 dump_folder: str | os.PathLike[str] = "non-finite", overlap: str | None = None) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay), state_dtype=state_dtype,
                         master=master, max_grad_norm=max_grad_norm, update=update, overlap=overlap, non_finite=non_finite,
                         dump_folder=dump_folder)

    def options_of(self, group: Mapping[str, Any]) -> Options:
        beta1, beta2 = map(float, group["betas"])
        return Options(float(group["lr"]), beta1, beta2, float(group["eps"]), float(group["weight_decay"]))
