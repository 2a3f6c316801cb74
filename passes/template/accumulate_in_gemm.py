"""accumulate_in_gemm: weight gradients are returned as the operands of their GEMM.

Before: a matrix parameter's gradient is `mm(a, b)`, perhaps transposed or viewed. After: `a` and `b` (transposed if the
gradient was) are results instead, and `meta["gradients"]` names both. The runtime computes `addmm` into its float32
accumulator, which saves one rounding and one pass over memory. The gradient of all experts' matrices is returned as three
results: the tokens' rows, the rows that they are multiplied by, and where each expert's rows end. A product in float8 is
returned as its operands and their scales, and `meta["gradients"]` names its kernel. A gradient that is rounded from float32 in
its last step is returned unrounded. Other gradients (biases, norms, embeddings) are unchanged.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from megacompile.ir.tokenwise import VIEWS, is_scaled
from megacompile.passes.template import Target, copy_graph

name = "accumulate_in_gemm"
level = "variant"

aten = torch.ops.aten
_VIEWS = frozenset(view.default for view in VIEWS)


def run(graph: fx.GraphModule, target: Target) -> fx.GraphModule:
    """`graph` with operands instead of GEMM results, for every parameter that matches the pattern."""
    result = copy_graph(graph)
    output = result.graph.output_node()
    results: list[fx.Node] = list(output.args[0])  # type: ignore[arg-type]
    gradients = result.meta["gradients"]
    first = min((indices[0] for _, indices in gradients), default=len(results))
    kept, described = results[:first], []
    placeholders = result.graph.find_nodes(op="placeholder")
    parameters = {placeholders[i] for i in result.meta["parameters"]}
    for index, (position,) in gradients:
        leaving: tuple[fx.Node, ...] = (results[position],)
        kernel: tuple[str, ...] = ()
        if placeholders[index] in parameters:
            if (product := _scaled_product(results[position])) is not None:
                leaving, kernel = product.args[:4], (str(product.args[6]),)  # type: ignore[assignment]
            else:
                with result.graph.inserting_before(output):
                    leaving = _leaving(result.graph, results[position], parameters)
        described.append((index, tuple(range(len(kept), len(kept) + len(leaving))), *kernel))
        kept.extend(leaving)
    output.args = (tuple(kept),)
    result.meta["gradients"] = tuple(described)
    # A graph cut from a joint graph is functional and draws no random numbers: unread nodes have no effect.
    result.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    result.recompile()
    return result


def _leaving(graph: fx.Graph, gradient: fx.Node, parameters: set[fx.Node]) -> tuple[fx.Node, ...]:
    if gradient.target is aten._to_copy.default:
        exact: fx.Node = gradient.args[0]  # type: ignore[assignment]
        if _val(exact).dtype is torch.float32:
            return _leaving(graph, exact, parameters)
    node, transposed = gradient, False
    while True:
        if _transposes(node):
            transposed = not transposed
        elif not (node.target in _VIEWS and _val(node).shape == _val(node.args[0]).shape):  # type: ignore[arg-type]
            break
        node = node.args[0]  # type: ignore[assignment]
    grouped = _is_grouped_over_rows(node)
    if not (grouped or node.target is aten.mm.default) or _val(node).dtype != _val(gradient).dtype:
        return (gradient,)
    # An operand that views a parameter (a low-rank factor) would be overwritten with the parameter's slot.
    operands: list[fx.Node] = list(node.args)  # type: ignore[arg-type]
    if any(_viewed(operand) in parameters for operand in operands):
        return (gradient,)
    a, b, *ends = operands
    if grouped:
        rows, others = _transpose(graph, a), b
        return (others, rows, *ends) if transposed else (rows, others, *ends)
    return (_transpose(graph, b), _transpose(graph, a)) if transposed else (a, b)


def _scaled_product(gradient: fx.Node) -> fx.Node | None:
    """The float8 product that makes a gradient, before it is rounded from float32."""
    node: Any = gradient.args[0] if gradient.target is aten._to_copy.default else gradient
    return node if is_scaled(node) and _val(node).dtype is torch.float32 and node.args[4] is None else None


def _is_grouped_over_rows(node: fx.Node) -> bool:
    """True if `node` is exactly the grouped product of [K, rows] and [rows, N], with one matrix for each group of rows."""
    if node.target is not aten._grouped_mm.default or len(node.args) != 3 or node.kwargs:
        return False
    return all(_val(operand).dim() == 2 for operand in node.args[:2])  # type: ignore[arg-type]


def _transposes(node: fx.Node) -> bool:
    """True if `node` is the transpose of a matrix, or of several, in any of aten's spellings."""
    if node.target is aten.t.default:
        return True
    if node.target is aten.transpose.int:
        dims = _val(node).dim()
        return sorted(dim % dims for dim in node.args[1:]) == [dims - 2, dims - 1]  # type: ignore[operator]
    order: list[int] = list(node.args[1]) if node.target is aten.permute.default else []  # type: ignore[arg-type]
    return order[-2:] == [len(order) - 1, len(order) - 2] and order[:-2] == [*range(len(order) - 2)]


def _viewed(node: fx.Node) -> fx.Node:
    while getattr(node.target, "is_view", False) or node.target is aten._unsafe_view.default:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _transpose(graph: fx.Graph, node: fx.Node) -> fx.Node:
    if _transposes(node):
        return node.args[0]  # type: ignore[return-value]
    transposed = graph.call_function(aten.permute.default, (node, [1, 0]))
    transposed.meta["val"] = _val(node).t()
    return transposed


def _val(node: fx.Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value
