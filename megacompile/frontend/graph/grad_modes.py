"""Finds the values of a model's graph that need a gradient, if layer calls share a region or run under `torch.no_grad()`.

Dynamo shares one region among all calls that compute the same, even if their inputs or weights need different gradients, or
they run in different grad modes. Each call is differentiated alone, in its own grad mode. So values made without a gradient
are detached after the call that makes them, and zeros come back to it; then the graph is run again on fakes to see which
values need a gradient.
"""
from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from megacompile.compat.core import FakeTensorMode, set_grad_enabled
from megacompile.errors import CaptureError
from megacompile.frontend.graph.split import writes
from megacompile.frontend.templates.refused_ops import refuse_unknown_sizes
from megacompile.frontend.tracing.layer_calls import source_line
from megacompile.frontend.tracing.model_graph import INVOKE, ModelGraph

_SWITCH = set_grad_enabled


def follow_gradients(model: ModelGraph) -> None:
    """Marks each value of `model` as needing a gradient or not, as in the original model. Raises `CaptureError` if a value is
    changed in place under `torch.no_grad()`, since a detached copy would not see the change."""
    graph = model.graph.graph
    without = set(_without_gradient(model))
    if _depend_on_layers(without):
        for node in without:
            if writes(node):
                raise CaptureError("a model that runs layers under torch.no_grad() changes a value in place there: make "
                                   f"a new value instead{source_line(node)}")
            _detach(graph, node)
        for node in graph.find_nodes(op="call_function", target=_SWITCH):
            graph.erase_node(node)
        model.graph.recompile()
        _run_again(model)
    elif any(_is_of_another(model, call) for call in graph.find_nodes(op="call_function", target=INVOKE)):
        _run_again(model)


def _without_gradient(model: ModelGraph) -> Iterator[fx.Node]:
    """The values that are made while gradients are disabled."""
    enabled = True
    found: set[fx.Node] = set()
    for node in model.graph.graph.nodes:
        if node.target is _SWITCH:
            enabled = bool(node.args[0])
        elif node.op not in ("placeholder", "get_attr", "output") and (
                node.args[0] in found if node.target is operator.getitem else not enabled):
            found.add(node)
            yield node


def _depend_on_layers(found: set[fx.Node]) -> bool:
    """True if any of these is a layer's call, or computed from layers' outputs. Ignores values made after the last layer."""
    if not found:
        return False
    nodes = list(next(iter(found)).graph.nodes)
    last = max((i for i, node in enumerate(nodes) if node.target is INVOKE), default=-1)
    made: set[fx.Node] = set()
    for node in nodes[:last + 1]:
        if node.target is INVOKE or made.intersection(node.all_input_nodes):
            made.add(node)
    return bool(made & found)


def _is_of_another(model: ModelGraph, call: fx.Node) -> bool:
    """True if a call uses a region that was traced for inputs with other needs of gradients."""
    region: fx.GraphModule = getattr(model.graph, str(call.args[0].target))  # type: ignore[union-attr]
    inputs = zip(region.graph.find_nodes(op="placeholder"), call.args[2:], strict=True)
    return any(_needs(inside) is not _needs(given) for inside, given in inputs if isinstance(given, fx.Node))


def _needs(node: fx.Node) -> bool:
    return getattr(node.meta["example_value"], "requires_grad", False) is True


def _run_again(model: ModelGraph) -> None:
    """Runs the graph on fakes of plain sizes, which add no guards, and marks each value that needs a gradient."""
    graph = model.graph.graph
    for part in model.graph.modules():
        if isinstance(part, fx.GraphModule):
            refuse_unknown_sizes(part, "the model")
    wrong: dict[fx.Node, bool] = {}

    class Again(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            if n.target is INVOKE:
                arguments: Any = self.map_nodes_to_values(n.args, n)
                return arguments[0](*arguments[2:])
            value = super().run_node(n)
            if isinstance(value, Tensor) and value.requires_grad is not _needs(n):
                wrong[n] = value.requires_grad
            return value

    with FakeTensorMode(), torch.enable_grad():
        inputs = [_of_plain_size(node.meta["example_value"]) for node in graph.find_nodes(op="placeholder")]
        Again(model.graph).run(*inputs, enable_io_processing=False)
    with model.fakes:
        for node, needs in wrong.items():
            node.meta["example_value"] = node.meta["example_value"].detach().requires_grad_(needs)


def _of_plain_size(value: Any) -> Any:
    if isinstance(value, Tensor):
        sizes, strides = (tuple(map(_of_plain_size, each)) for each in (value.shape, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype, requires_grad=value.requires_grad)
    return int(value.node.hint) if isinstance(value, torch.SymInt) else value


def _detach(graph: fx.Graph, node: fx.Node) -> None:
    value = node.meta.get("example_value")
    if not isinstance(value, Tensor) or not node.users:
        return
    with graph.inserting_after(node):
        detached = graph.call_method("detach", (node,))
    detached.meta = {**node.meta, "example_value": value}
    node.replace_all_uses_with(detached, delete_user_cb=lambda user: user is not detached)
