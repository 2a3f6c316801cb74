"""What a compiler of kernels fuses in a template's graph: which values ever exist in memory, and what they are made from.

Stages lie between kernels of their own (matrix products, attention): what a stage computes is one fused kernel. Cheap values
are computed again by whoever reads them; a value is *stored* if a reduction makes it, a kernel of its own reads it, or it is
a result.
"""
from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from megacompile.frontend.templates.joint import base_of

aten = torch.ops.aten

#: Positions of the two matrices of a GEMM.
GEMMS = {aten.mm.default: (0, 1), aten.addmm.default: (1, 2), aten.bmm.default: (0, 1), aten.baddbmm.default: (1, 2),
         aten._grouped_mm.default: (0, 1)}
_REDUCTIONS = frozenset({aten.sum, aten.mean, aten.amax, aten.amin, aten.var_mean, aten.logsumexp, aten._softmax,
                         aten._log_softmax, aten.cumsum, aten.sort, aten.topk})
#: Ops that read as many elements of their first input as they write, whatever its size.
_GATHERS = frozenset({aten.embedding, aten.index_select, aten.gather, aten.index})
#: A value that can be computed again from at most so many others is not worth a trip through memory.
_INLINED_READS = 4


@dataclass
class Fusion:
    """Of one graph: the values that are stored; for each value the stored ones that it is computed from (itself, if it is
    stored or a kernel's); its stage; what each stage reads; and the memory that kernels of their own read."""

    stored: set[fx.Node] = field(default_factory=set)
    sources: dict[fx.Node, set[fx.Node]] = field(default_factory=dict)
    stage: dict[fx.Node, int] = field(default_factory=dict)
    reads: dict[int, set[fx.Node]] = field(default_factory=dict)
    read_by_kernels: set[fx.Node] = field(default_factory=set)


def fuse(graph: fx.Graph) -> Fusion:
    found = Fusion()
    found.read_by_kernels = {
        base_of(used) for node in graph.nodes if node.op == "output" or kernel_of(node) for used in inputs(node)}
    stage, sources = found.stage, found.sources
    for node in graph.nodes:
        before = max((stage[base_of(used)] for used in node.all_input_nodes), default=0)
        if not computes(node):
            stage[node], sources[node] = before + (kernel_of(node) is not None), {node}
            continue
        made_from: set[fx.Node] = set().union(*(sources[used] for used in inputs(node)))
        stage[node], sources[node] = max((stage[s] for s in made_from), default=0), made_from
        if _is(node, _REDUCTIONS) or node in found.read_by_kernels or len(made_from) > _INLINED_READS:
            found.stored.add(node)
            found.reads.setdefault(stage[node], set()).update(made_from)
            sources[node] = {node}
    return found


def kernel_of(node: fx.Node) -> str | None:
    """Name of a kernel of its own; None for what a compiler fuses, and for what is no computation. (Loops over chunks of tokens
    are no part of a fused graph: whoever looks at one looks into their bodies.)"""
    if node.op != "call_function":
        return None
    if node.target in GEMMS:
        return "gemm"
    namespace, _, name = str(getattr(node.target, "name", lambda: "")()).partition("::")
    return name if namespace == "megacompile" else None


def tensor_of(node: Any) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


def computes(node: fx.Node) -> bool:
    """Whether a node makes new memory by an op that is no kernel of its own."""
    return (node.op == "call_function" and isinstance(node.meta.get("val"), Tensor) and base_of(node) is node
            and node.target is not operator.getitem and kernel_of(node) is None)


def inputs(node: fx.Node) -> Iterator[fx.Node]:
    """The memory that a node reads; a gather reads the rows that it picks, which count as its result."""
    for used in node.all_input_nodes:
        gathered = _is(node, _GATHERS) and used is node.args[0]
        if isinstance(used.meta.get("val"), Tensor) and not gathered:
            yield base_of(used)


def _is(node: fx.Node, ops: Collection[Any]) -> bool:
    return getattr(node.target, "overloadpacket", None) in ops
