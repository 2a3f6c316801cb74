"""What templates hold, as functions of batch B and length T: bytes of a variant at its peak, of results and residuals.
(What they execute is `flops.py`'s.)

The first cost model: liveness over a variant's graph, every op's result in memory of its own (views share their base's),
and what our own ops hold inside. Compiled code fuses, so it holds less; matrix kernels' workspaces and rounding by the
allocator are the margin's.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from megacompile.frontend.joint import base_of
from megacompile.frontend.template import Template, Variant
from megacompile.fusion import computes, fuse

#: Peaks found so far, by (batch, length): a planner asks for the same ones hundreds of times.
_peaks: weakref.WeakKeyDictionary[Variant, dict[tuple[int, int, bool], int]] = weakref.WeakKeyDictionary()


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
    """Explicit scores [B, H, T, T] in float32, as many as are alive at once; flash kernels hold none."""
    *_, softcap, kernel = node.args
    query, key = (argument.meta["val"] for argument in node.args[backward:backward + 2])  # type: ignore[union-attr]
    if kernel not in ("math", "neutral"):
        return 0
    batch, heads, length, width = map(size, query.shape)
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


def peak_bytes(template: Template, variant: Variant, batch: int, length: int, fused: bool = False) -> int:
    """Most bytes that a variant's own values (its inputs aside) take at once. `fused`: it runs compiled, so that values
    inside of fused kernels take none."""
    known = _peaks.setdefault(variant, {})
    if (batch, length, fused) not in known:
        known[batch, length, fused] = _peak_bytes(template, variant, batch, length, fused)
    return known[batch, length, fused]


def _peak_bytes(template: Template, variant: Variant, batch: int, length: int, fused: bool) -> int:
    size = at(template, batch, length)
    graph = variant.graph.graph
    fusion = fuse(graph) if fused else None
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for used in node.all_input_nodes:
            base = base_of(used)
            for value in fusion.sources[base] if fusion is not None else (base,):
                last[value] = node  # a value that is computed again keeps what it is computed from
    inside = {n for n in graph.nodes if fusion is not None and computes(n) and n not in fusion.stored}
    dies: dict[fx.Node, list[fx.Node]] = {}
    for value, node in last.items():
        dies.setdefault(node, []).append(value)
    held = peak = 0
    for node in graph.nodes:
        if node.op == "call_function" and base_of(node) is node and node not in inside:
            held += tensor_bytes(node.meta.get("val"), size)
            workspace = WORKSPACE.get(node.target)
            peak = max(peak, held + (workspace(node, size, template._target.device_type) if workspace else 0))
        for value in dies.get(node, ()):
            if value.op == "call_function":
                held -= tensor_bytes(value.meta.get("val"), size)
    return peak


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
