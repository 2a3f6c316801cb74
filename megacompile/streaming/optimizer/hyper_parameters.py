"""The options of a parameter group: checked at construction and at every step, and copied by value.

A tensor or a list in a group may change after `step()` has returned, while the update still runs.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import Tensor

from megacompile.errors import MegacompileError, UnsupportedError

#: Options of torch.optim.AdamW that change the update rule, with the values that leave it as it is.
_UNSUPPORTED = {"amsgrad": False, "maximize": False, "differentiable": False, "decoupled_weight_decay": True}
_OF_ALL = ("max_grad_norm", "overlap", "non_finite", "dump_folder")


def is_number(value: Any) -> bool:
    return isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex())


def _are_betas(value: Any) -> bool:
    return (isinstance(value, tuple | list | Tensor) and len(value) == 2
            and all(is_number(beta) and 0 <= beta < 1 for beta in value))


#: For each option, what it must be, and a check.
_RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("lr", "eps", "weight_decay"), ("a number of at least 0", lambda x: is_number(x) and bool(x >= 0))),
    "betas": ("two numbers of at least 0 and below 1", _are_betas),
}


def check_options(group: Mapping[str, Any]) -> None:
    """Raises `MegacompileError` for an option of a parameter group that is out of range or not implemented."""
    for option, only in _UNSUPPORTED.items():
        if bool(group.get(option, only)) != only:
            raise UnsupportedError(f"{option}={group[option]!r} is not implemented by megacompile.AdamW: leave it out")
    for option in _OF_ALL:
        if option in group:
            raise MegacompileError(f"{option} cannot be set for a parameter group: pass it to AdamW(...)")
    for option, (what, good) in _RANGES.items():
        if option in group and not good(group[option]):
            raise MegacompileError(f"{option}={group[option]!r} is out of range: give {what}")


def checked_norm(value: Any, overlap: str | None) -> float | None:
    """The global norm that gradients are clipped to; None: no clipping. Raises `MegacompileError`."""
    if value is not None and not (is_number(value) and value > 0):
        raise MegacompileError(f"max_grad_norm={value!r} is out of range: give a number above 0, or None")
    if overlap is not None and value is not None:
        raise MegacompileError("overlap='backward' updates before the global norm is known: leave max_grad_norm out")
    return None if value is None else float(value)


@dataclass(frozen=True)
class HyperParameters:
    """The options of one group at one step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> HyperParameters:
        """Raises the errors of `check_options`, and `MegacompileError` for a missing option."""
        if missing := [option for option in _RANGES if option not in group]:
            raise MegacompileError(f"a parameter group has no {missing[0]}: set it again (optimizer.param_groups[...]"
                                   f"[{missing[0]!r}] = ...)")
        check_options(group)
        beta1, beta2 = map(float, group["betas"])
        return cls(float(group["lr"]), beta1, beta2, float(group["eps"]), float(group["weight_decay"]))
