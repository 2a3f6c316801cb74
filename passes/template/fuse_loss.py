"""fuse_loss: head and cross entropy become one op over chunks of tokens, so that all logits never exist at once.

Before: `linear(hidden, weight, bias)`, perhaps scaled, capped, cast to float32, sliced or reshaped, then `cross_entropy(...,
reduction="sum") / loss_denominator`. After: `megacompile.linear_cross_entropy` of the sliced `hidden`, forward and backward in
one op. A chain that contains anything else, or whose logits are read elsewhere, is not changed.
"""
from __future__ import annotations

import dataclasses
import inspect
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from megacompile.compat.core import builtin_linear
from megacompile.ir.token_loop import CHUNK_TOKENS, example_of
from megacompile.passes.template import Target, copy_graph

name = "fuse_loss"
level = "model"


@dataclasses.dataclass
class _Chain:
    """The chain of ops between the head and the loss, found by walking backwards."""

    head: fx.Node
    reshapes: list[fx.Node]  # on leading dimensions, in program order
    scale: float = 1.0
    softcap: float = 0.0


def run(graph: fx.GraphModule, target: Target) -> fx.GraphModule:
    """`graph` with its head and loss fused, if its chain has the form above."""
    result = copy_graph(graph)
    for node in result.graph.find_nodes(op="call_function", target=F.cross_entropy):
        if _fuse(result.graph, node):
            break
    result.recompile()
    return result


def _fuse(graph: fx.Graph, entropy: fx.Node) -> bool:
    bound = inspect.signature(F.cross_entropy).bind(*entropy.args, **entropy.kwargs)
    bound.apply_defaults()
    given = bound.arguments
    division = next(iter(entropy.users), None)
    if (given["reduction"] != "sum" or given["weight"] is not None or given["label_smoothing"] != 0.0
            or len(entropy.users) != 1 or division is None or division.target is not operator.truediv
            or division.args[0] is not entropy or not _is_loss_denominator(division.args[1])):
        return False
    chain = _walk(given["input"], entropy)
    if chain is None or len(given["target"].meta["example_value"].shape) != 1:
        return False
    hidden, weight, *bias = (*chain.head.args, *chain.head.kwargs.values())
    width = example_of(weight).shape[1]
    with graph.inserting_before(entropy):
        for node in chain.reshapes:
            arguments = node.args[1:]
            if _calls_method(node, "view") or _calls_method(node, "reshape"):
                arguments = _with_last(arguments, width)
            hidden = graph.create_node(node.op, node.target, (hidden, *arguments), dict(node.kwargs))
        call = graph.call_function(torch.ops.megacompile.linear_cross_entropy.default, (
            hidden, weight, bias[0] if bias else None, given["target"], division.args[1], given["ignore_index"],
            chain.scale, chain.softcap, CHUNK_TOKENS, example_of(weight).requires_grad))
        loss = graph.call_function(operator.getitem, (call, 0))
    loss.meta = dict(division.meta)
    division.replace_all_uses_with(loss)
    dead = division
    while dead is not chain.head.args[0] and not dead.users:
        following: Any = given["input"] if dead is entropy else dead.all_input_nodes[0]
        graph.erase_node(dead)
        dead = following
    return True


def _walk(node: fx.Node, user: fx.Node) -> _Chain | None:
    """The chain from the loss back to the head, if only the next op reads each value; else None."""
    chain = _Chain(node, [])
    multiplied, capped = 1.0, False  # factor since the tanh, or since the loss
    while list(node.users) == [user]:
        if node.target in (F.linear, builtin_linear):
            chain.head = node
            chain.scale *= multiplied * (chain.softcap if capped else 1.0)
            return chain if _linear(node) else None
        if node.op == "call_method" and node.target == "float" or _casts_to_float(node) or _calls_method(node, "contiguous"):
            pass
        elif (factor := _factor(node)) is not None:
            multiplied *= factor
        elif (node.target is torch.tanh or _calls_method(node, "tanh")) and not capped:
            chain.softcap, multiplied, capped = multiplied, 1.0, True
            if chain.softcap <= 0:
                return None
        elif _keeps_last_dimension(node):
            chain.reshapes.insert(0, node)
        else:
            return None
        if not node.all_input_nodes:
            return None
        user, node = node, node.all_input_nodes[0]
    return None


def _linear(node: fx.Node) -> bool:
    weight = (*node.args, *node.kwargs.values())[1]
    return isinstance(weight, fx.Node) and example_of(weight).dim() == 2 and not set(node.kwargs) - {"bias"}


def _calls_method(node: fx.Node, method: str) -> bool:
    return node.op == "call_method" and node.target == method


def _casts_to_float(node: fx.Node) -> bool:
    return _calls_method(node, "to") and node.meta["example_value"].dtype is torch.float32


def _factor(node: fx.Node) -> float | None:
    """The number that `node` multiplies by; None for other ops."""
    numbers = [(place, a) for place, a in enumerate(node.args) if isinstance(a, (int, float))]
    if len(node.args) != 2 or len(numbers) != 1:
        return None
    ((place, number),) = numbers
    if node.target in (operator.mul, torch.mul) or _calls_method(node, "mul"):
        return float(number)
    if place == 1 and (node.target in (operator.truediv, torch.div) or _calls_method(node, "div")):
        return 1.0 / number
    return None


def _keeps_last_dimension(node: fx.Node) -> bool:
    """True if `node` slices or reshapes leading dimensions only, so that it commutes with the head."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    before, after = example_of(node.args[0]), example_of(node)
    if before.shape[-1] != after.shape[-1]:
        return False
    if node.target is operator.getitem:
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        full = index[-1] == slice(None) or (Ellipsis not in index and len(index) < before.dim())
        return after.dim() == before.dim() and all(isinstance(i, slice) or i is Ellipsis for i in index) and full
    if _calls_method(node, "view") or _calls_method(node, "reshape"):
        sizes = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
        # The vocabulary must be given as the last size: -1 there would be another number for `hidden`.
        return len(node.args) > 1 and isinstance(sizes[-1], int) and sizes[-1] == before.shape[-1]
    if _calls_method(node, "flatten") or node.target is torch.flatten:
        end: Any = node.kwargs.get("end_dim", node.args[2] if len(node.args) > 2 else -1)
        return bool(end % before.dim() != before.dim() - 1)
    return False


def _with_last(sizes: tuple[Any, ...], width: int) -> tuple[Any, ...]:
    """A reshape's sizes, with this width of `hidden` instead of the vocabulary as the last size."""
    if isinstance(sizes[-1], (tuple, list)):
        return (*sizes[:-1], (*sizes[-1][:-1], width))
    return (*sizes[:-1], width)


def _is_loss_denominator(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "placeholder" and node.meta["example_value"].dim() == 0
