"""The options of a parameter group: checked at construction and at every step, and copied by value.

A tensor or a list in a group may change after `step()` has returned, while the update still runs.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, NamedTuple

from torch import Tensor

from megacompile.errors import MegacompileError, UnsupportedError
from megacompile.runtime.memory.state_layout import ElementState
from megacompile.runtime.optimizer.rule import Rule
from megacompile.runtime.optimizer.state_format import FORMATS

#: Options of PyTorch's optimizers that change the update rule, with the values that leave it as it is.
_UNSUPPORTED = {"amsgrad": False, "maximize": False, "differentiable": False, "decoupled_weight_decay": True}
_OF_ALL = ("max_grad_norm", "update", "overlap", "non_finite", "dump_folder")
MASTERS = ("float32", "bfloat16")


class Check(NamedTuple):
    """A description of the values that an option may have, and a function that tests a value."""

    what: str
    good: Callable[[Any], bool]


def is_number(value: Any) -> bool:
    return isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex())


def _are_betas(value: Any) -> bool:
    return (isinstance(value, tuple | list | Tensor) and len(value) == 2
            and all(is_number(beta) and 0 <= beta < 1 for beta in value))


NON_NEGATIVE = Check("a finite number of at least 0", lambda value: is_number(value) and 0 <= value < math.inf)
BELOW_ONE = Check("a number of at least 0 and below 1", lambda value: is_number(value) and 0 <= value < 1)
TWO_BETAS = Check("two numbers of at least 0 and below 1", _are_betas)
FLAG = Check("True or False", lambda value: isinstance(value, bool))
#: Options that say how state is kept, for every optimizer.
KEPT = {
    "state_dtype": Check(f"one of {', '.join(FORMATS)}", lambda value: value in FORMATS),
    "master": Check(f"one of {', '.join(MASTERS)}", lambda value: value in MASTERS),
}


def check_options(group: Mapping[str, Any], checks: Mapping[str, Check], optimizer: str) -> None:
    """Raises `MegacompileError` for an option of a parameter group that is out of range or not implemented. `checks`: for each
    option of the `optimizer`."""
    for option, only in _UNSUPPORTED.items():
        if option not in checks and bool(group.get(option, only)) != only:
            raise UnsupportedError(f"{option}={group[option]!r} is not implemented by megacompile.{optimizer}: leave it out")
    for option in _OF_ALL:
        if option in group:
            raise MegacompileError(f"{option} cannot be set for a parameter group: pass it to {optimizer}(...)")
    for option, (what, good) in {**checks, **KEPT}.items():
        if option in group and not good(group[option]):
            raise MegacompileError(f"{option}={group[option]!r} is out of range: give {what}")


def check_complete(group: Mapping[str, Any], checks: Mapping[str, Check], optimizer: str) -> None:
    """As `check_options`. Raises `MegacompileError` for a missing option too."""
    if missing := [option for option in (*checks, *KEPT) if option not in group]:
        raise MegacompileError(f"a parameter group has no {missing[0]}: set it again (optimizer.param_groups[...]"
                               f"[{missing[0]!r}] = ...)")
    check_options(group, checks, optimizer)


def is_on_arrival(update: Any, overlap: Any) -> bool:
    """True if a tile is updated when its gradients arrive. `overlap`: the former name, with None for "step" and "backward" for
    "arrival". Raises `MegacompileError` for another value of either."""
    if update not in ("step", "arrival") or overlap not in (None, "backward"):
        given = f"update={update!r}" if overlap is None else f"overlap={overlap!r}"
        raise MegacompileError(f"{given} is out of range: give update='step' (all at the end of the step) or update='arrival' "
                               "(each tile when its gradients arrive)")
    return bool(update == "arrival" or overlap)


def checked_norm(value: Any, on_arrival: bool) -> float | None:
    """The global norm to clip gradients to. None, 0 and infinity mean no clipping. Raises `MegacompileError`."""
    if value is not None and not (is_number(value) and value >= 0):
        raise MegacompileError(f"max_grad_norm={value!r} is out of range: give a number above 0, or None or 0 for no clipping")
    limit = None if value is None or float(value) in (0.0, math.inf) else float(value)
    if on_arrival and limit is not None:
        raise MegacompileError("update='arrival' updates before the global norm is known: leave max_grad_norm out")
    return limit


def state_of_group(group: Mapping[str, Any], rule: Rule) -> ElementState:
    """The state that is stored for each element of a group's parameters."""
    return ElementState(tuple(moment.name for moment in rule.moments), FORMATS[group["state_dtype"]],
                        exact=group["master"] == "float32", separable=rule.separable, rule=rule.name)
