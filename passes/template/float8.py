"""float8: products of decoder layers with their weights are computed in float8, forward and backward.

Before: `linear(x, weight, bias)` in a layer. After: `megacompile.scaled_linear(x, weight, bias, ...)` with the fields of the
target's recipe (`megacompile.ir.precision.Float8`). Differentiated, that is casts and three `megacompile.scaled_mm`.

These stay as they are: prologue and epilogue; products that the recipe keeps, and those of routers; products with a small
weight, or one whose sides are not multiples of 16; grouped products of experts. Without a recipe, no graph is changed.
`meta["products"]` says for each `linear` from which parameters its weight is made, and why it stays as it is or "".
"""
from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from megacompile.compat.core import builtin_linear
from megacompile.ir.precision import Float8
from megacompile.ir.token_loop import example_of
from megacompile.passes.template import Target, copy_graph

name = "float8"
level = "model"


def run(graph: fx.GraphModule, target: Target) -> fx.GraphModule:
    """`graph` with the products of a layer in float8, if the target has a recipe."""
    recipe = target.precision
    if recipe is None or "weights" not in graph.meta:
        return graph
    result = copy_graph(graph)
    weights = dict(zip(result.graph.find_nodes(op="placeholder"), graph.meta["weights"], strict=True))
    products: list[tuple[tuple[str, ...], str]] = []
    for node in list(result.graph.nodes):
        if node.op != "call_function" or node.target not in (F.linear, builtin_linear):
            continue
        arguments = inspect.signature(_linear).bind(*node.args, **node.kwargs).arguments
        x, weight, bias = arguments["input"], arguments["weight"], arguments.get("bias")
        names = _parameters(weight, weights)
        reason = _kept(recipe, x, weight, names)
        products.append((names, reason))
        if not reason:
            node.target = torch.ops.megacompile.scaled_linear.default
            node.args = (x, weight, bias, recipe.scaling, recipe.gradients, recipe.weight_gradients, recipe.fast_accumulation,
                         recipe.emulated)
            node.kwargs = {}
    result.meta["products"] = tuple(products)
    result.recompile()
    return result


def _linear(input: Any, weight: Any, bias: Any = None) -> None:
    """The arguments of `F.linear`."""


def _kept(recipe: Float8, x: fx.Node, weight: fx.Node, names: tuple[str, ...]) -> str:
    """The reason why a product stays as it is; "" if it does not stay."""
    shape, dtypes = example_of(weight).shape, {example_of(x).dtype, example_of(weight).dtype}
    if not names or len(shape) != 2 or not all(isinstance(size, int) for size in shape):
        return "is not a product with a matrix of weights"
    if any(map(recipe.keeps, names)):
        return "is kept by the recipe"
    if misfit := recipe.misfit(*shape):
        return misfit
    if len(dtypes) > 1 or not dtypes <= ({torch.bfloat16, torch.float32} if recipe.emulated else {torch.bfloat16}):
        return f"is computed in {' and '.join(sorted(str(dtype).removeprefix('torch.') for dtype in dtypes))}"
    return ""


def _parameters(node: fx.Node, weights: dict[fx.Node, str]) -> tuple[str, ...]:
    """The names of the parameters that a value is made from; none if it is also made from anything else."""
    found: dict[str, None] = {}
    stack = [node]
    while stack:
        each = stack.pop()
        if each.op == "placeholder":
            if not weights[each]:
                return ()
            found[weights[each]] = None
        stack.extend(each.all_input_nodes)
    return tuple(found)
