"""A graph as text that is the same in every process: without addresses, and without the symbols and numbers of one process."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from megacompile.compat.core import OpOverload
from megacompile.frontend.ops.patch_encoder import encoder_of
from megacompile.frontend.templates.joint import JointGraph

#: Which argument of an encoder call is the encoder's number.
_NUMBERED = {torch.ops.megacompile.encode_patches.default: 4, torch.ops.megacompile.encode_patches_backward.default: 5}


def lines_of(joint: JointGraph, symbolic: Callable[[int | torch.SymInt], Any]) -> Iterator[str]:
    """A line for each node, with the shapes, strides and dtypes of its values; `symbolic` writes sizes. At the end, what the
    graph reads."""
    for node in joint.graph.graph.nodes:
        yield repr((node.op, node.name, _target(node.target), _arguments(node), dict(node.kwargs),
                    _value(node.meta.get("val"), symbolic)))
    yield repr((joint.inputs, joint.tangents, joint.outputs, joint.gradients, joint.residuals))


def _target(target: Any) -> str:
    if isinstance(target, str | OpOverload):
        return str(target)
    return f"{target.__module__}.{target.__qualname__}"  # the text of a function has its address


def _arguments(node: fx.Node) -> list[Any]:
    given: list[Any] = list(node.args)
    if node.target in _NUMBERED:
        at = _NUMBERED[node.target]  # type: ignore[index]
        encoder = encoder_of(given[at])
        given[at] = encoder.per_feature, encoder.patch, encoder.levels, encoder.held_bytes
    return given


def _value(value: Any, symbolic: Callable[[int | torch.SymInt], Any]) -> Any:
    if isinstance(value, tuple | list):
        return [_value(each, symbolic) for each in value]
    if isinstance(value, torch.Tensor):
        return value.dtype, [symbolic(size) for size in value.shape], [symbolic(size) for size in value.stride()]
    return symbolic(value) if isinstance(value, int | torch.SymInt) else type(value).__name__
