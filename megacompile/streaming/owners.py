"""Which streamed model a parameter belongs to: optimizers are given parameters alone."""
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
    """Lets optimizers find the streamed model behind its parameters."""
    for name, parameter in nn.Module.named_parameters(streamed.model):  # those too that no call reads
        _OWNERS[parameter] = (weakref.ref(streamed), name)


def disclaim(streamed: Streamed) -> None:
    for _, parameter in nn.Module.named_parameters(streamed.model):
        if parameter in _OWNERS and _OWNERS[parameter][0]() is streamed:
            del _OWNERS[parameter]


def check_unclaimed(model: nn.Module) -> None:
    """Raises `MegacompileError` if a parameter lives in another model's tiles: two tiles would fight over its memory."""
    for name, parameter in nn.Module.named_parameters(model):
        owner = _OWNERS[parameter][0]() if parameter in _OWNERS else None
        if owner is not None:
            raise MegacompileError(
                f"{name} belongs to a {type(owner.model).__name__} that is streamed already: close() that one first, or give "
                "each model parameters of its own")


def owner_of(parameter: Tensor) -> tuple[Streamed, str] | None:
    """The streamed model of a parameter, and the name that it has there; None of one that belongs to none (any more)."""
    owner, name = _OWNERS.get(parameter, (None, ""))
    streamed = owner() if owner is not None else None
    return None if streamed is None else (streamed, name)


def require_owner(parameter: Tensor) -> tuple[Streamed, str]:
    """As `owner_of`. Raises `MegacompileError` where there is none."""
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
