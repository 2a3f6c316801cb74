"""What templates hold, as functions of batch B and length T: bytes of a variant at its peak, of results and residuals.
(What they execute is `flops.py`'s.)

The first cost model: liveness over a variant's graph, every op's result in memory of its own (views share their base's).
Compiled code fuses, so it holds less; matrix kernels' workspaces and rounding by the allocator are the margin's.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from megacompile.frontend.joint import base_of
from megacompile.frontend.template import Template, Variant

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


def peak_bytes(template: Template, variant: Variant, batch: int, length: int) -> int:
    """Most bytes that a variant's own values (its inputs aside) take at once."""
    known = _peaks.setdefault(variant, {})
    if (batch, length) not in known:
        known[batch, length] = _peak_bytes(template, variant, batch, length)
    return known[batch, length]


def _peak_bytes(template: Template, variant: Variant, batch: int, length: int) -> int:
    size = at(template, batch, length)
    graph = variant.graph.graph
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for used in node.all_input_nodes:
            last[base_of(used)] = node
    dies: dict[fx.Node, list[fx.Node]] = {}
    for value, node in last.items():
        dies.setdefault(node, []).append(value)
    held = peak = 0
    for node in graph.nodes:
        if node.op == "call_function" and base_of(node) is node:
            held += tensor_bytes(node.meta.get("val"), size)
            peak = max(peak, held)
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
