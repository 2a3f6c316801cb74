"""Muon (Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024): matrices move along the nearest
orthogonal matrix to their momentum, and everything else is updated by AdamW.

Which parameters are matrices, and what `split` does, is in the docstring of `Muon`.
"""
from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megacompile.errors import UnsupportedError
from megacompile.runtime.memory.state_layout import ElementState
from megacompile.runtime.optimizer.rule import MatrixRule, Moment, Rule
from megacompile.runtime.optimizer.state_format import BFLOAT16, BLOCK, FORMATS
from megacompile.streaming.optimizer import adamw
from megacompile.streaming.optimizer.hyper_parameters import (
    BELOW_ONE,
    FLAG,
    NON_NEGATIVE,
    TWO_BETAS,
    Check,
    is_number,
    is_on_arrival,
)
from megacompile.streaming.optimizer.optimizer import StreamedOptimizer
from megacompile.weights.tiling import Tiling


# --------------------
# The nearest orthogonal matrix, about, by the Newton-Schulz iteration of Muon (Jordan et al., "Muon: an optimizer for hidden
# layers in neural networks", 2024), with the operations and roundings of `torch.optim.Muon`.
def orthogonal(given: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float, scratch: Tensor) -> Tensor:
    """fp32 or bf16 [rows, columns] -> bf16 [rows, columns], with singular values of about 1, in `scratch`: uint8, of at least
    `products_bytes`."""
    a, b, c = coefficients
    rows, columns = given.shape
    least, count = min(rows, columns), rows * columns
    values = scratch.view(torch.bfloat16)
    matrix, other = (values[at:at + count].view(rows, columns) for at in (0, count))
    gram, product = (values[2 * count + at:2 * count + at + least * least].view(least, least) for at in (0, least * least))
    matrix.copy_(given)
    if rows > columns:
        matrix, other = matrix.T, other.T
    matrix.div_(matrix.norm().clamp(min=eps))  # no singular value is above 1
    for _ in range(steps):
        torch.mm(matrix, matrix.T, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=product)
        torch.addmm(matrix, product, matrix, beta=a, out=other)
        matrix, other = other, matrix
    return matrix.T if rows > columns else matrix


#: The dependence of the learning rate on a matrix's size. "match_rms_adamw": steps are as large as AdamW's, so one learning
#: rate fits all parameters (Liu et al., "Muon is scalable for LLM training", 2025). "original": as Jordan et al. have it.
_RATIOS = {"match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
           "original": lambda rows, columns: math.sqrt(max(1, rows / columns))}
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_SPLIT = Check("None, or the sizes of the parts in rows", lambda value: value is None or (
    isinstance(value, tuple | list) and bool(value) and all(isinstance(size, int) and size > 0 for size in value)))


@dataclass(frozen=True)
class Options:
    """The options at one step of one matrix, or of a parameter that holds several. `shape`: of the parameter."""

    lr: float
    ratio: str
    momentum: float
    nesterov: bool
    weight_decay: float
    coefficients: tuple[float, float, float]
    eps: float
    steps: int
    split: tuple[int, ...] | None
    shape: tuple[int, ...] = ()
    scaled_lr: float = 0.0  # that of the direction


def _momentum_values(options: Options, step: int) -> tuple[float, ...]:
    del step
    return 1 - options.momentum, options.momentum, float(options.nesterov)


def _momentum_reference(direction: Tensor, gradient: Tensor, moments: list[Tensor], options: Options, step: int) -> None:
    del step
    (m,) = moments
    m.lerp_(gradient, 1 - options.momentum)
    direction.copy_(gradient.lerp(m, options.momentum) if options.nesterov else m)


def _weights_values(options: Options, step: int) -> tuple[float, ...]:
    del step
    return 1 - options.lr * options.weight_decay, options.scaled_lr


def _weights_reference(master: Tensor, direction: Tensor, moments: list[Tensor], options: Options, step: int) -> None:
    del moments, step
    master.mul_(1 - options.lr * options.weight_decay).add_(direction, alpha=-options.scaled_lr)


def _options_of(group: Mapping[str, Any], shape: tuple[int, ...]) -> Options:
    split = None if group["split"] is None else tuple(group["split"])
    a, b, c = map(float, group["ns_coefficients"])
    return Options(float(group["lr"]), group["adjust_lr_fn"], float(group["momentum"]), group["nesterov"],
                   float(group["weight_decay"]), (a, b, c), float(group["ns_eps"]), group["ns_steps"], split, shape)


def _matrices(options: Options) -> list[tuple[int, int]]:
    *stack, rows, columns = options.shape
    each = [(part, columns) for part in options.split] if options.split else [(rows, columns)]
    return each * math.prod(stack)


def _options_for(options: Options, rows: int, columns: int) -> Options:
    return replace(options, scaled_lr=options.lr * _RATIOS[options.ratio](rows, columns))


def _direction(given: Tensor, options: Options, scratch: Tensor) -> Tensor:
    return orthogonal(given, options.coefficients, options.steps, options.eps, scratch)


MATRICES = MatrixRule(
    name="muon",
    momentum=Rule(
        name="muon_momentum",
        moments=(Moment("momentum_buffer", signed=True),),
        scalars=("gradient_weight", "momentum", "nesterov"),
        # torch.lerp starts from its nearer end.
        code="""\
  const Exact g(gradient), old(moments[0]);
  const bool from_moment = s.gradient_weight < 0.5f, from_gradient = s.momentum < 0.5f;
  const Exact m = FMA(Exact(from_moment ? s.gradient_weight : s.gradient_weight - 1.0f), g - old, from_moment ? old : g);
  const Exact ahead = FMA(Exact(from_gradient ? s.momentum : s.momentum - 1.0f), m - g, from_gradient ? g : m);
  moments[0] = VALUE(m);
  master = VALUE(s.nesterov != 0.0f ? ahead : m);""",
        values=_momentum_values, reference=_momentum_reference, separable=False),
    weights=Rule(
        name="muon_weights",
        moments=(),
        scalars=("decay", "lr"),
        # torch adds a multiple by a fused multiply-add.
        code="""\
  (void)moments;
  master = VALUE(FMA(Exact(-s.lr), Exact(gradient), Exact(master) * Exact(s.decay)));""",
        values=_weights_values, reference=_weights_reference, separable=False),
    options_of=_options_of, matrices=_matrices, options_for=_options_for, direction=_direction)


def _is_matrix(model: nn.Module, name: str, shape: tuple[int, ...]) -> bool:
    """True for two-dimensional weights of modules other than embeddings, and for stacks of matrices (of experts)."""
    owner, _, own_name = name.rpartition(".")
    if min(shape[-2:], default=0) < 2:
        return False
    if len(shape) == 2:
        return own_name == "weight" and not isinstance(model.get_submodule(owner), nn.Embedding)
    return len(shape) == 3 and not isinstance(model.get_submodule(owner), _CONVOLUTIONS)


class Muon(StreamedOptimizer):
    """Muon for matrices, and AdamW for everything else. Other arguments and what it does: `StreamedOptimizer`.

    Which parameters are matrices:

        linear layers of the decoder layers     matrices, adapters (LoRA) and the routers of experts among them
        stacks of experts                       each expert is a matrix by itself
        fused matrices                          one matrix, as for torch.optim.Muon; with split, each part by itself
        embeddings, head, vision towers         AdamW: everything outside of the decoder layers
        norms, biases, convolutions             AdamW, like single rows and columns

    `split`: the sizes of the parts of a group's matrices, in rows. Jordan et al. recommend it for queries, keys and values. A
    group with `split` has matrices of one size: `Muon([{"params": qkv, "split": (4096, 1024, 1024)}, {"params": gate_up,
    "split": (14336, 14336)}, {"params": others}])`. Halves that are columns, as in the experts of gpt-oss, are not split.

    `matrices=False` leaves a group to AdamW, for example routers, which have a row for each expert.

    `momentum`, `nesterov`, `ns_coefficients`, `ns_steps`, `ns_eps` and `adjust_lr_fn` are those of `torch.optim.Muon`, whose
    `eps` is `ns_eps` here; `betas` and `eps` are those of AdamW. The default of `adjust_lr_fn` is "match_rms_adamw", so that
    learning rates of AdamW fit. With "original", give matrices a group of their own with a larger one.

    Matrices are updated on the device: they stay there with their state, or visit it for each update. So updates on arrival are
    refused, with `UnsupportedError`. Of several ranks of a host each updates its shard, with the momentum of whole matrices."""

    rule: ClassVar[Rule] = adamw.RULE
    matrix_rule: ClassVar[MatrixRule | None] = MATRICES
    more: ClassVar[Mapping[str, Any]] = {"matrices": True, "split": None}
    checks: ClassVar[Mapping[str, Check]] = {
        "lr": NON_NEGATIVE, "weight_decay": NON_NEGATIVE, "momentum": BELOW_ONE, "nesterov": FLAG, "betas": TWO_BETAS,
        "eps": NON_NEGATIVE, "ns_eps": NON_NEGATIVE, "matrices": FLAG, "split": _SPLIT,
        "ns_coefficients": Check("three finite numbers", lambda value: isinstance(value, tuple | list) and len(value) == 3
                                 and all(is_number(each) and math.isfinite(each) for each in value)),
        "ns_steps": Check("a whole number from 1 to 99", lambda value: isinstance(value, int) and 1 <= value < 100),
        "adjust_lr_fn": Check(f"one of {', '.join(_RATIOS)}", lambda value: value in _RATIOS)}

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95,
                 nesterov: bool = True, ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
                 ns_eps: float = 1e-7, ns_steps: int = 5, adjust_lr_fn: str = "match_rms_adamw",
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, *, matrices: bool = True,
                 split: tuple[int, ...] | None = None, state_dtype: str = "float32", master: str = "float32",
                 max_grad_norm: float | None = None, update: str = "step", non_finite: str = "raise",
                 dump_folder: str | os.PathLike[str] = "non-finite", overlap: str | None = None) -> None:
        if is_on_arrival(update, overlap):
            raise UnsupportedError("Muon updates whole matrices on the device at the end of a step: leave update out")
        super().__init__(
            params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov,
                         ns_coefficients=ns_coefficients, ns_eps=ns_eps, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn,
                         betas=betas, eps=eps, matrices=matrices, split=split),
            state_dtype=state_dtype, master=master, max_grad_norm=max_grad_norm, update="step", overlap=None,
            non_finite=non_finite, dump_folder=dump_folder)

    def options_of(self, group: Mapping[str, Any]) -> adamw.Options:
        beta1, beta2 = map(float, group["betas"])
        return adamw.Options(float(group["lr"]), beta1, beta2, float(group["eps"]), float(group["weight_decay"]))

    @staticmethod
    def options_of_torch(saved: dict[str, Any]) -> dict[str, Any]:
        if "ns_eps" in saved or "eps" not in saved:
            return saved
        return {"ns_eps" if option == "eps" else option: value for option, value in saved.items()} | {
            "adjust_lr_fn": saved.get("adjust_lr_fn") or "original"}

    @classmethod
    def states_of(cls, group: Mapping[str, Any], names: Iterable[str], model: nn.Module,
                  tiling: Tiling) -> dict[str, ElementState]:
        """The stored state of the parameters, by name. Parameters that `_is_matrix` accepts have the state of the matrix rule.
        It has bf16 moments instead of 8-bit ones if a block of 8-bit state would span two matrices."""
        found = super().states_of(group, names, model, tiling)
        boundary = tiling.boundary()
        for name in found if group["matrices"] else ():
            tile, position = tiling.position[name]
            shape = tiling.host[tile].slices[position].shape
            if tile not in boundary and _is_matrix(model, name, shape):
                found[name] = _matrix_state(group, shape)
        return found


def _matrix_state(group: Mapping[str, Any], shape: tuple[int, ...]) -> ElementState:
    wanted, split = FORMATS[group["state_dtype"]], group["split"]
    if split and sum(split) != shape[-2]:
        raise UnsupportedError(f"split={split!r} is for matrices of {sum(split)} rows, and one of the group has {shape[-2]}: "
                               "give each fused matrix a group with the sizes of its parts")
    sizes = [rows * shape[-1] for rows in split or (shape[-2],)]
    if wanted.scaled and any(size % BLOCK for size in sizes):
        wanted = BFLOAT16
    return ElementState(("momentum_buffer",), wanted, exact=group["master"] == "float32", whole=True, separable=False,
                        rule="muon")
