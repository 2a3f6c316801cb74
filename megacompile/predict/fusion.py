"""What a kernel compiler fuses in a template's graph: which values exist in memory, and which values they are computed from.

Matrix products and attention are separate kernels. The ops between them form stages, each of which is one fused kernel. Cheap
values are computed again wherever they are read. A value is *stored* if a reduction makes it, if a separate kernel reads it, or
if it is a result.
"""
from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Set
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
#: A value that can be computed from at most this many others is computed again, not stored.
_INLINED_READS = 4


@dataclass
class Fusion:
    """The fusion of one graph. `made_from`: for each stored value, in the order of the graph, the values that it is computed
    from. `sources`: for each value the stored values that it is computed from (itself, if it is stored or the result of a
    separate kernel). `stage`: its stage. `read_by_kernels`: the values that separate kernels read."""

    made_from: dict[fx.Node, set[fx.Node]] = field(default_factory=dict)
    sources: dict[fx.Node, set[fx.Node]] = field(default_factory=dict)
    stage: dict[fx.Node, int] = field(default_factory=dict)
    read_by_kernels: set[fx.Node] = field(default_factory=set)

    @property
    def stored(self) -> Set[fx.Node]:
        """The stored values."""
        return self.made_from.keys()

    def reads(self) -> dict[int, set[fx.Node]]:
        """The values that each stage reads."""
        found: dict[int, set[fx.Node]] = {}
        for node, values in self.made_from.items():
            found.setdefault(self.stage[node], set()).update(values)
        return found

    def made_together(self) -> list[set[fx.Node]]:
        """The stored values in groups, each of which one kernel writes. A compiler fuses ops of a stage that read the same
        values of the results' size, or each other's results. It allocates all results of a kernel before it frees an input."""
        groups: dict[fx.Node, set[fx.Node]] = {}
        first: dict[tuple[int, fx.Node], fx.Node] = {}  # a stage and a value -> the first stored value that it is part of
        for node, read in self.made_from.items():
            groups[node] = {node}
            size = _elements(node)
            for value in (node, *read):
                if _elements(value) == size:
                    other = first.setdefault((self.stage[node], value), node)
                    smaller, larger = sorted((groups[other], groups[node]), key=len)
                    if smaller is not larger:
                        larger |= smaller
                        groups |= dict.fromkeys(smaller, larger)
        return list({id(group): group for group in groups.values()}.values())


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
            found.made_from[node] = made_from
            sources[node] = {node}
    return found


def kernel_of(node: fx.Node) -> str | None:
    """The name of a separate kernel; None for ops that a compiler fuses, and for nodes that compute nothing. (A fused graph has
    no loops over chunks of tokens: callers look at the loops' bodies instead.)"""
    if node.op != "call_function":
        return None
    if node.target in GEMMS:
        return "gemm"
    namespace, _, name = str(getattr(node.target, "name", lambda: "")()).partition("::")
    return name if namespace == "megacompile" else None


def tensor_of(node: Any) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


def _elements(node: fx.Node) -> str:
    """The number of elements of a value, as text: to compare symbolic numbers would fix them."""
    return str(tensor_of(node).numel())


def computes(node: fx.Node) -> bool:
    """Whether a node allocates its result and its op is not a separate kernel."""
    return (node.op == "call_function" and isinstance(node.meta.get("val"), Tensor) and base_of(node) is node
            and node.target is not operator.getitem and kernel_of(node) is None)


def inputs(node: fx.Node) -> Iterator[fx.Node]:
    """The values that a node reads. The rows that a gather reads count as its result, not as an input."""
    for used in node.all_input_nodes:
        gathered = _is(node, _GATHERS) and used is node.args[0]
        if isinstance(used.meta.get("val"), Tensor) and not gathered:
            yield base_of(used)


def _is(node: fx.Node, ops: Collection[Any]) -> bool:
    return getattr(node.target, "overloadpacket", None) in ops
