"""Rows that a model takes apart and joins again: `torch.cat(list(features))`, with one tensor for each image.

The list has as many items as there are images, so its graph holds for only that number of images. Images are therefore traced
with a number of their own. If the graph only joins the items, `join_rows` rewrites this without a list, and the graph holds
for as many images as a batch has rows.
"""
from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from megacompile.compat.core import FakeTensorMode, enable_python_dispatcher
from megacompile.frontend.batches.pair_masks import aligned, is_images, pairs_of
from megacompile.frontend.tracing.explained import TRACING_ERRORS
from megacompile.frontend.tracing.model_graph import INVOKE, ModelGraph

#: The number of images when it is traced apart from the number of sequences. A graph that has it as a constant is refused.
TRACED_ROWS = 7


def fixes_rows(graph: ModelGraph) -> bool:
    """True if the batch size became a constant."""
    first = next(n.meta["example_value"] for n, s in graph.sources.items() if s.kind == "batch")
    size = first.shape[0]
    return not isinstance(size, torch.SymInt) or isinstance(graph.shape_env.simplify(size.node.expr), sympy.Integer)


def images_of(batch: Mapping[str, Tensor]) -> set[str]:
    """The batch arguments that may be images, with one tensor of a fixed size each."""
    return {name for name, tensor in batch.items() if is_images(tensor)} - aligned(batch) - pairs_of(batch)


def traced_apart(batch: Mapping[str, Tensor], fakes: FakeTensorMode) -> dict[str, Tensor]:
    """The images of a fake batch, `TRACED_ROWS` of them."""
    with fakes:
        return {name: torch.zeros((TRACED_ROWS, *batch[name].shape[1:]), dtype=batch[name].dtype) for name in images_of(batch)}


def images_in_a_row(batch: Mapping[str, Tensor], each: int) -> dict[str, Tensor]:
    """The batch in the form that a model takes. If there are several images per sequence (`each`), the arguments have [batch,
    each, ...]."""
    several = images_of(batch) if each > 1 else set()
    return {name: tensor.flatten(0, 1) if name in several else tensor for name, tensor in batch.items()}


def join_rows(graph: ModelGraph, images: Collection[str], each: int) -> bool:
    """Makes a graph whose batch arguments `images` were traced with `TRACED_ROWS` rows, of `each` images, hold for as many rows
    as the batch has. Returns False if it cannot, because some items are used individually. Then the graph is useless."""
    for node in list(graph.graph.graph.nodes):
        if (rows := _all_rows(node, TRACED_ROWS * each)) is not None:
            with graph.graph.graph.inserting_before(node):
                joined = graph.graph.graph.call_method("flatten", (rows, 0, 1))
            joined.meta = dict(node.meta)
            items = list(node.all_input_nodes)
            node.replace_all_uses_with(joined)
            for dead in (node, *items):
                graph.graph.graph.erase_node(dead)
    graph.graph.recompile()
    traced = {TRACED_ROWS, TRACED_ROWS * each}
    return _forget_number(graph, images, traced) and _propagate(graph, images, traced)


def _forget_number(graph: ModelGraph, images: Collection[str], traced: Collection[int]) -> bool:
    """Drops the assumption that the number of images is one of `traced`, which making the list added. Returns False if more was
    assumed."""
    numbers = {symbol for n, s in graph.sources.items() if s.kind == "batch" and s.name in images
               for symbol in n.meta["example_value"].shape[0].node._expr.free_symbols}
    assumed = [guard for guard in graph.shape_env.guards if numbers & guard.expr.free_symbols]
    graph.shape_env.guards = [guard for guard in graph.shape_env.guards if guard not in assumed]
    return all(isinstance(guard.expr, sympy.Eq) and sympy.solve(guard.expr, symbol) == [TRACED_ROWS]
               and max(guard.expr.atoms(sympy.Integer)) in traced
               for guard in assumed for symbol in guard.expr.free_symbols)


def _all_rows(node: fx.Node, count: int) -> fx.Node | None:
    """The tensor [`count`, n, ...] whose rows `node` joins, if nothing else reads any of the rows."""
    if node.target not in (torch.cat, torch.concat) or {*node.args[1:], *node.kwargs.values()} - {0}:
        return None
    items: Any = node.args[0]
    if len(items) != count or any(n.target is not operator.getitem or list(n.users) != [node] for n in items):
        return None
    (tensor, *others) = dict.fromkeys(n.args[0] for n in items)
    value = tensor.meta["example_value"]
    in_order = [n.args[1] for n in items] == list(range(count))
    return tensor if in_order and not others and isinstance(value, Tensor) and value.dim() > 1 else None


def _propagate(graph: ModelGraph, images: Collection[str], traced: Collection[int]) -> bool:
    """Gives `images` the batch's rows, and everything computed from them the resulting shapes. Returns False if that fails, or
    if a `traced` number is in the graph."""
    first = next(n.meta["example_value"] for n, s in graph.sources.items() if s.kind == "batch" and s.name not in images)
    changed: set[fx.Node] = set()
    with graph.fakes, torch.enable_grad(), enable_python_dispatcher():
        for node in graph.graph.graph.nodes:
            source = graph.sources.get(node)
            if source is not None and source.kind == "batch" and source.name in images:
                value = node.meta["example_value"]
                node.meta["example_value"] = value.new_empty((first.shape[0], *value.shape[1:]))
                changed.add(node)
            elif node.op != "output" and changed.intersection(node.all_input_nodes):
                before = node.meta.get("example_value")
                if node.target is INVOKE or not set(traced).isdisjoint(_literals(node)):
                    return False
                try:
                    after = _computed(node)
                except TRACING_ERRORS:  # an op got sizes that do not fit
                    return False
                if not _alike(before, after):
                    node.meta["example_value"] = after
                    changed.add(node)
    return True


def _literals(node: fx.Node) -> list[Any]:
    found: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), lambda a: found.append(a) if isinstance(a, int) else None)
    return found


def _computed(node: fx.Node) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["example_value"])
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target), f"{node.name} is not a call"
    return node.target(*args, **kwargs)


def _alike(a: Any, b: Any) -> bool:
    """True if two tensors have the same shape as text. Comparing the numbers would add guards."""
    return isinstance(a, Tensor) and isinstance(b, Tensor) and str((a.shape, a.stride())) == str((b.shape, b.stride()))
