"""SGD with momentum: `torch.optim.SGD`, operation by operation."""
from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from megacompile.runtime.optimizer.rule import Moment, Rule
from megacompile.streaming.optimizer.hyper_parameters import BELOW_ONE, FLAG, NON_NEGATIVE, Check
from megacompile.streaming.optimizer.optimizer import StreamedOptimizer


@dataclass(frozen=True)
class Options:
    """The options of one group at one step."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool


def _values(options: Options, step: int) -> tuple[float, ...]:
    """The scalars of torch.optim.SGD. Its first buffer is the undampened gradient, and steps without momentum leave the buffer
    as it is. (Momentum that begins later than the first step dampens its first gradient too, unlike in torch.)"""
    if not options.momentum:
        return options.lr, 1.0, 0.0, 1.0, 0.0, options.weight_decay
    momentum, gradient = (options.momentum, 1 - options.dampening) if step > 1 else (0.0, 1.0)
    ahead = options.momentum if options.nesterov else 0.0
    return options.lr, momentum, gradient, float(options.nesterov), ahead, options.weight_decay


def _reference(master: Tensor, gradient: Tensor, moments: list[Tensor], options: Options, step: int) -> None:
    lr, momentum, weight, from_gradient, ahead, decay = _values(options, step)
    (buffer,) = moments
    gradient = gradient.add(master, alpha=decay)
    buffer.mul_(momentum).add_(gradient, alpha=weight)
    master.add_(gradient.add(buffer, alpha=ahead) if from_gradient else buffer, alpha=-lr)


RULE = Rule(
    name="sgd",
    moments=(Moment("momentum_buffer", signed=True),),
    scalars=("lr", "momentum", "gradient_weight", "from_gradient", "ahead", "weight_decay"),
    # torch adds a multiple by a fused multiply-add.
    code="""\
  const Exact g = FMA(Exact(s.weight_decay), Exact(master), Exact(gradient));
  const Exact buffer = FMA(Exact(s.gradient_weight), g, Exact(moments[0]) * Exact(s.momentum));
  const Exact direction = s.from_gradient != 0.0f ? FMA(Exact(s.ahead), buffer, g) : buffer;
  moments[0] = VALUE(buffer);
  master = VALUE(FMA(Exact(-s.lr), direction, Exact(master)));""",
    values=_values, reference=_reference,
    separable=False)  # with weight decay the buffer depends on the weights


class SGD(StreamedOptimizer):
    """`torch.optim.SGD` for streamed models. `StreamedOptimizer` describes the other arguments and the behavior."""

    rule: ClassVar[Rule] = RULE
    checks: ClassVar[Mapping[str, Check]] = {
        "lr": NON_NEGATIVE, "momentum": BELOW_ONE, "dampening": NON_NEGATIVE, "weight_decay": NON_NEGATIVE, "nesterov": FLAG}

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, momentum: float = 0.0, dampening: float = 0.0,
                 weight_decay: float = 0.0, nesterov: bool = False, *, state_dtype: str = "float32", master: str = "float32",
                 max_grad_norm: float | None = None, update: str = "step", non_finite: str = "raise",
                 dump_folder: str | os.PathLike[str] = "non-finite", overlap: str | None = None) -> None:
        super().__init__(
            params, dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov),
            state_dtype=state_dtype, master=master, max_grad_norm=max_grad_norm, update=update, overlap=overlap,
            non_finite=non_finite, dump_folder=dump_folder)

    def options_of(self, group: Mapping[str, Any]) -> Options:
        lr, momentum, dampening, decay = (float(group[name]) for name in ("lr", "momentum", "dampening", "weight_decay"))
        return Options(lr, momentum, dampening, decay, group["nesterov"])
