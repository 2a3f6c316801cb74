"""The ops that exchange values between the tokens of a row, by name: attention, recurrences, short convolutions, and those that
users register for their architectures (`megacompile.mixers.register_mixer`)."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx


@dataclass(frozen=True)
class Mixer:
    """`segments`: the position of the argument that holds the sequence of each token; None: the op takes none, so sequences of
    a packed row would read each other. `flops` and `workspace_bytes` are functions of the op's arguments, with the shape of
    each tensor instead of the tensor; None: unknown."""

    segments: int | None
    flops: Callable[..., Any] | None = None
    workspace_bytes: Callable[..., Any] | None = None


MIXERS = {"megacompile.attention": Mixer(7), "megacompile.recurrence": Mixer(7), "megacompile.causal_conv": Mixer(5)}
#: Those of users.
REGISTERED: dict[str, Mixer] = {}


def op_name(target: Any) -> str:
    """The name of an op without its overload, such as "megacompile.attention"."""
    return ".".join(str(target).split(".")[:2])


def mixer_of(target: Any) -> Mixer | None:
    """The mixer that a node calls."""
    name = op_name(target)
    return MIXERS.get(name) or REGISTERED.get(name)


def with_shapes(node: fx.Node, size: Callable[[Any], Any]) -> list[Any]:
    """The arguments of a node, with the shape of each tensor, in sizes that `size` gives, instead of the tensor."""
    values = (argument.meta["val"] if isinstance(argument, fx.Node) else argument for argument in node.args)
    return [tuple(map(size, value.shape)) if isinstance(value, Tensor) else value for value in values]
