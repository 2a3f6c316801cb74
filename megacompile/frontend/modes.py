"""Does a captured graph hold where it was not captured: in evaluation mode, for one sequence, for one token?

Models are captured in training mode at sizes of at least 2. A branch on `self.training` leaves no trace in the graph, and
one on a size of 1 leaves no guard, since symbolic sizes are taken to be 2 or more. So before such a call is first served,
the model is traced again in that mode or at that size, and must perform the same operations.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from megacompile.frontend.model_graph import ModelGraph

#: Broadcasting changes no value, and models leave it out where there is one sequence.
_BROADCASTS = frozenset({"expand", "expand_as", "broadcast_to", "contiguous"})


def operations(graph: ModelGraph) -> tuple[str, ...]:
    """Every operation on tensors, in order, with its constants but for whole numbers, which sizes are among."""
    return tuple(_operations(graph.graph))


def _operations(module: fx.GraphModule) -> Iterator[str]:
    for node in module.graph.nodes:
        nested = [getattr(module, str(n.target), None) for n in node.all_input_nodes if n.op == "get_attr"]
        if graphs := [each for each in nested if isinstance(each, fx.GraphModule)]:
            for each in graphs:  # in place of the call: whether equal layers share a region is Dynamo's choice
                yield from _operations(each)
        elif node.op in ("call_function", "call_method") and _makes_tensors(node):
            if _is_idle_dropout(node) or getattr(node.target, "__name__", node.target) in _BROADCASTS:
                continue
            constants = [repr(c) for c in _leaves((node.args, node.kwargs)) if isinstance(c, float | bool | str | torch.dtype)]
            yield " ".join([str(node.target), *constants])


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from _leaves(item)
    else:
        yield value


def _makes_tensors(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return any(isinstance(v, Tensor) for v in (value if isinstance(value, tuple | list) else (value,)))


def _is_idle_dropout(node: fx.Node) -> bool:
    """Dropout with p = 0 says in its arguments whether it trains, and does nothing either way."""
    if node.target is not F.dropout:
        return False
    p = node.kwargs.get("p", node.args[1] if len(node.args) > 1 else 0.5)
    return isinstance(p, int | float) and p == 0
