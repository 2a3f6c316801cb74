"""Finds the streamed model of a parameter: optimizers are given only parameters."""
from __future__ import annotations

import weakref
from collections.abc import Iterable, MutableMapping
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from megacompile.errors import MegacompileError

if TYPE_CHECKING:
    from megacompile.streaming.streamed import Streamed

_OWNERS: MutableMapping[Tensor, tuple[weakref.ref[Streamed], str]] = WeakIdKeyDictionary()


def claim(streamed: Streamed) -> None:
    """Registers the streamed model of these parameters, so that optimizers find it."""
    for name, parameter in nn.Module.named_parameters(streamed.model):  # also parameters that no call reads
        _OWNERS[parameter] = (weakref.ref(streamed), name)


def disclaim(streamed: Streamed) -> None:
    for _, parameter in nn.Module.named_parameters(streamed.model):
        if parameter in _OWNERS and _OWNERS[parameter][0]() is streamed:
            del _OWNERS[parameter]


def check_unclaimed(model: nn.Module) -> None:
    """Raises `MegacompileError` if a parameter already lives in another model's tiles."""
    for name, parameter in nn.Module.named_parameters(model):
        owner = _OWNERS[parameter][0]() if parameter in _OWNERS else None
        if owner is not None:
            raise MegacompileError(
                f"{name} belongs to a {type(owner.model).__name__} that is streamed already: close() that one first, or give "
                "each model parameters of its own")


def owner_of(parameter: Tensor) -> tuple[Streamed, str] | None:
    """The streamed model of a parameter and the parameter's name there; None if it belongs to no streamed model."""
    owner, name = _OWNERS.get(parameter, (None, ""))
    streamed = owner() if owner is not None else None
    return None if streamed is None else (streamed, name)


def require_owner(parameter: Tensor) -> tuple[Streamed, str]:
    """Like `owner_of`. Raises `MegacompileError` instead of returning None."""
    owner = owner_of(parameter)
    if owner is None:
        raise MegacompileError(
            f"a parameter of shape {list(parameter.shape)} belongs to no streamed model: call model = "
            "megacompile.stream(model) before making the optimizer, and make a new optimizer after close()")
    return owner


def owners_of(parameters: Iterable[Tensor]) -> list[Streamed]:
    """The streamed models of these parameters, each once."""
    found = (owner_of(parameter) for parameter in parameters)
    return list({id(each[0]): each[0] for each in found if each is not None}.values())
