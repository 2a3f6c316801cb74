"""What templates hold, as functions of batch B and length T: bytes of a variant at its peak, of results and residuals.
(What they execute is `flops.py`'s.)

The first cost model: liveness over a variant's graph, every op's result in memory of its own (views share their base's),
and what our own ops hold inside. Compiled code fuses, so it holds less; matrix kernels' workspaces and rounding by the
allocator are the margin's.
"""
from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from megacompile.frontend.joint import base_of
from megacompile.frontend.template import Template, Variant
from megacompile.token_loop import TokenLoop, Total, total_dtype

#: Peaks found so far, by (batch, length): a planner asks for the same ones hundreds of times.
_peaks: weakref.WeakKeyDictionary[Variant, dict[tuple[int, int], int]] = weakref.WeakKeyDictionary()


def at(template: Template, batch: int, length: int) -> Callable[[Any], int]:
    """A function from a size of a graph's `meta["val"]` to its value at this batch and length."""
    values = dict(zip(template.symbols, (batch, length), strict=True))
    return lambda size: int(template.symbolic(size).subs(values)) if isinstance(size, torch.SymInt) else int(size)


def tensor_bytes(value: Any, size: Callable[[Any], int]) -> int:
    if isinstance(value, torch.Tensor):
        return size(value.numel()) * value.element_size()
    if isinstance(value, tuple | list):
        return sum(tensor_bytes(v, size) for v in value)
    return 0


def _attention_workspace(node: fx.Node, size: Callable[[Any], int], device_type: str, backward: bool) -> int:
    """Explicit scores [B, H, T, T] in float32, as many as are alive at once; flash kernels hold none, but for what their
    backward on CUDA sums up in."""
    *_, softcap, kernel = node.args
    query, key = (argument.meta["val"] for argument in node.args[backward:backward + 2])  # type: ignore[union-attr]
    batch, heads, length, width = map(size, query.shape)
    if kernel == "flash" and backward:
        # The query's gradient grows in float32; keys' and values' have one head for each of the query's at first.
        grouped = 0 if size(key.shape[1]) == heads else 2 * tensor_bytes(query, size)
        columns = -(-width // 32) * 32 if width <= 192 else 256
        return batch * heads * (-(-length // 128) * 128) * 4 * (columns + 1) + grouped
    if kernel not in ("math", "neutral"):
        return 0
    half = query.element_size() if query.element_size() < 4 else 0
    scores = batch * heads * length**2 * (4 * ((6 if softcap else 5) if backward else 3) + half)
    positions = 10 * length**2  # distances, int64, and what they hide
    expanded = 0 if size(key.shape[1]) == heads else 2 * batch * heads * length * width * query.element_size()
    return scores + positions + expanded + (tensor_bytes(query, size) if backward else 0)


def _cross_entropy_workspace(node: fx.Node, size: Callable[[Any], int], device_type: str) -> int:
    """A chunk's scores and their gradient, in the weights' dtype, beside those of the chunk before; on the CPU, where the op
    runs unfused, float32 values in between."""
    hidden, weight = (argument.meta["val"] for argument in node.args[:2])  # type: ignore[union-attr]
    scale, softcap, chunk = node.args[6:9]
    assert isinstance(chunk, int)
    rows, count = chunk, size(hidden.shape[0])
    values = min(rows, count) * size(weight.shape[0])
    if device_type == "cuda":
        return (3 if count > rows else 2) * values * weight.element_size()
    return values * (4 * (6 + (2 if softcap else int(scale != 1))) + 1)


#: What our own ops hold beside their results: (node, size, device type) -> bytes.
WORKSPACE: dict[Any, Callable[[fx.Node, Callable[[Any], int], str], int]] = {
    torch.ops.megacompile.attention.default: partial(_attention_workspace, backward=False),
    torch.ops.megacompile.attention_backward.default: partial(_attention_workspace, backward=True),
    torch.ops.megacompile.linear_cross_entropy.default: _cross_entropy_workspace,
}


def peak_bytes(template: Template, variant: Variant, batch: int, length: int) -> int:
    """Most bytes that a variant's own values (its inputs aside) take at once."""
    known = _peaks.setdefault(variant, {})
    if (batch, length) not in known:
        known[batch, length] = _peak_bytes(template, variant, batch, length)
    return known[batch, length]


def _peak_bytes(template: Template, variant: Variant, batch: int, length: int) -> int:
    device_type = template._target.device_type

    def loop_workspace(node: fx.Node) -> int:
        loop = getattr(variant.graph, str(node.target))
        return _loop_workspace(loop, at(template, batch, min(loop.chunk, length)), device_type)

    return _graph_peak(variant.graph.graph, at(template, batch, length), device_type, loop_workspace)


def _graph_peak(graph: fx.Graph, size: Callable[[Any], int], device_type: str,
                loop_workspace: Callable[[fx.Node], int] | None = None) -> int:
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for used in node.all_input_nodes:
            last[base_of(used)] = node
    dies: dict[fx.Node, list[fx.Node]] = {}
    for value, node in last.items():
        dies.setdefault(node, []).append(value)
    held = peak = 0
    for node in graph.nodes:
        if node.op in _MAKING and base_of(node) is node:
            held += _made_bytes(node, size)
            inside = 0
            if node.op == "call_module":
                assert loop_workspace is not None, "a loop within a loop"
                inside = loop_workspace(node)
            elif workspace := WORKSPACE.get(node.target):
                inside = workspace(node, size, device_type)
            peak = max(peak, held + inside)
        for value in dies.get(node, ()):
            if value.op in _MAKING:
                held -= _left_bytes(value, size)
    return peak


_MAKING = ("call_function", "call_module")


def _made_bytes(node: fx.Node, size: Callable[[Any], int]) -> int:
    """What comes into being with a node: the items of several results are there before they are taken out."""
    return 0 if node.target is operator.getitem else tensor_bytes(node.meta.get("val"), size)


def _left_bytes(node: fx.Node, size: Callable[[Any], int]) -> int:
    """What goes with the last look at a node: of several results, those that were not taken out."""
    value = node.meta.get("val")
    if isinstance(value, tuple | list):
        taken = {user.args[1] for user in node.users if user.target is operator.getitem}
        value = [item for i, item in enumerate(value) if i not in taken]
    return tensor_bytes(value, size)


def _loop_workspace(loop: TokenLoop, size: Callable[[Any], int], device_type: str) -> int:
    """What a loop over chunks holds beside its results: copies of its inputs' chunks, which not every layout needs, and the
    body's values; where no GEMM accumulates in float32, a product's operands and share in float32 too."""
    body = loop.body.graph
    _, _, *placeholders = body.find_nodes(op="placeholder")
    pieces = sum(tensor_bytes(node.meta["val"], size) for node, tokens in zip(placeholders, loop.inputs, strict=True) if tokens)
    results: Any = body.output_node().args[0]
    product, position = 0, 0
    for output in loop.outputs:
        if isinstance(output, Total) and output.product and device_type != "cuda":
            operands = [node.meta["val"] for node in results[position:position + 2]]
            wide = total_dtype(operands[0].dtype)
            if wide != operands[0].dtype:
                product = max(product, sum(size(x.numel()) for x in operands) * wide.itemsize)
        position += 2 if isinstance(output, Total) and output.product else 1
    return pieces + _graph_peak(body, size, device_type) + product


def result_bytes(template: Template, variant: Variant, batch: int, length: int) -> int:
    """Bytes of everything that a variant returns."""
    size = at(template, batch, length)
    results = variant.graph.graph.output_node().all_input_nodes
    return sum(tensor_bytes(node.meta.get("val"), size) for node in dict.fromkeys(results))


def output_bytes(template: Template, batch: int, length: int) -> int:
    """Bytes of a template's outputs: what a checkpoint of it takes."""
    values = dict(zip(template.symbols, (batch, length), strict=True))
    return int(template.output_bytes().subs(values))


def residual_bytes(template: Template, batch: int, length: int) -> int:
    values = dict(zip(template.symbols, (batch, length), strict=True))
    return int(template.residual_bytes().subs(values))
