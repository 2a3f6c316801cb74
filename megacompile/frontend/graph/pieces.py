"""A layer's section, cut where pieces of its experts begin: one section for what comes before them, and one for each piece.

    model.layers.3                        attention, router, shared experts
    model.layers.3.mlp.experts.pieces.0   experts 0 to 31
    model.layers.3.mlp.experts.pieces.1   experts 32 to 63, and the rest of the layer

What a piece reads from earlier ones is handed from section to section. What the layer computes after its experts without
reading them (shared experts) moves to the front; what it computes from their output belongs to the last piece.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from fractions import Fraction

import sympy
import torch
from torch import fx

from megacompile.compat.core import LazyGraphModule
from megacompile.errors import CaptureError
from megacompile.frontend.graph.expert_pieces import BOUNDARY, Rows
from megacompile.frontend.graph.split import NUMBERS, Section, needs_gradient, owned
from megacompile.frontend.graph.totals import MODES, writes
from megacompile.frontend.templates.template import Source
from megacompile.frontend.tracing.layer_calls import source_line

_WHOLE = "keep the experts whole (expert_pieces=1)"


def in_pieces(section: Section, rows: Mapping[str, Rows], sizes: Mapping[sympy.Symbol, Source]) -> list[Section]:
    """The sections that `section` is cut into; only itself if its experts are not in pieces. `sizes`: the source of each of a
    batch's sizes. Raises `CaptureError` if pieces cannot run apart, because one would change another's value in place."""
    graph = section.graph.graph
    boundaries = [n for n in graph.nodes if n.target in (BOUNDARY, BOUNDARY.default)]
    if not boundaries:
        return [section]
    pieces = {source.name.rpartition(".")[0] for source in section.sources if source.name in rows}
    if len(boundaries) != len(pieces) + 1:
        raise CaptureError(f"{section.name} runs its experts more than once: {_WHOLE}")
    return _Cut(section, rows, sizes, boundaries).sections()


class _Cut:
    """State, made once: the stage of each node (0 before the pieces, then the pieces) and where each value is last read."""

    def __init__(self, section: Section, rows: Mapping[str, Rows], sizes: Mapping[sympy.Symbol, Source],
                 boundaries: Sequence[fx.Node]) -> None:
        self.section, self.rows, self.boundaries = section, rows, boundaries
        self.nodes = [n for n in section.graph.graph.nodes if n.op != "output"]
        self.sources = dict(zip((n for n in self.nodes if n.op == "placeholder"), section.sources, strict=True))
        (results,) = section.graph.graph.output_node().args
        self.results: list[fx.Node] = list(results)  # type: ignore[arg-type]
        self.last = len(boundaries) - 1
        self.stage = self._stages()
        numbers = {n: n.meta["example_value"] for n in self.nodes
                   if n not in self.sources and isinstance(n.meta.get("example_value"), NUMBERS)}
        # No call passes a number to another: sizes are read from the batch, and arithmetic on them is repeated.
        self.sizes = {n: sizes[value.node.expr] for n, value in numbers.items()
                      if isinstance(value, torch.SymInt) and value.node.expr in sizes}
        self.along = numbers.keys() - self.sizes.keys()
        self.last_read: dict[fx.Node, int] = {}
        for stage in range(1, self.last + 1):
            self.last_read |= dict.fromkeys(self._read(stage), stage)

    def _stages(self) -> dict[fx.Node, int]:
        stage, now = dict.fromkeys(self.sources, 0), 0
        for node in self.nodes:
            now = min(now + (node in self.boundaries), self.last + 1)
            if now > self.last and node is self.boundaries[-1]:
                stage[node] = self.last
            elif node not in stage and now <= self.last:
                stage[node] = now
            elif node not in stage and node.all_input_nodes:
                stage[node] = self.last if any(stage.get(n, 0) for n in node.all_input_nodes) or writes(node) else 0
        for node in reversed(self.nodes):  # constants after the pieces: where they are read
            stage.setdefault(node, min((stage[user] for user in node.users if user in stage), default=self.last))
        for node in self.nodes:
            if node not in self.sources and writes(node) and stage[node.all_input_nodes[0]] != stage[node]:
                raise CaptureError(f"{self.section.name} changes a value in place that pieces of its experts read: make a "
                                   f"new value instead, or {_WHOLE}{source_line(node)}")
            if stage[node] and getattr(node.target, "__name__", "") in MODES:
                raise CaptureError(f"{self.section.name} switches gradients or autocast around its experts or after them: "
                                   f"{_WHOLE}{source_line(node)}")
        return stage

    def _read(self, stage: int) -> dict[fx.Node, None]:
        """Values of earlier stages, and inputs, that a stage reads, in order."""
        pending = [a for n in self.nodes if self.stage[n] == stage for a in n.all_input_nodes]
        pending += self.results if stage == self.last else []
        found: dict[fx.Node, None] = {}
        seen: set[fx.Node] = set()
        while pending:
            node = pending.pop(0)
            if node in seen or (self.stage[node] == stage and node not in self.sources):
                continue
            seen.add(node)
            if node in self.along:
                pending.extend(node.all_input_nodes)
            else:
                found[node] = None
        return dict.fromkeys(n for n in self.nodes if n in found)

    def _is_handed(self, node: fx.Node) -> bool:
        """Whether a value of an earlier stage comes from the call before. Every call may read other inputs directly."""
        return node not in self.sizes and (node not in self.sources or self.sources[node].kind == "carried")

    def _handed_on(self, stage: int) -> list[fx.Node]:
        return [n for n in self.nodes if self._is_handed(n) and self.stage[n] <= stage < self.last_read.get(n, 0)]

    def sections(self) -> list[Section]:
        made: list[Section] = []
        previous: list[fx.Node] = []
        for stage in range(self.last + 1):
            results = self.results if stage == self.last else self._handed_on(stage)
            made.append(self._section(stage, previous, results))
            previous = results
        return made

    def _section(self, stage: int, previous: list[fx.Node], results: list[fx.Node]) -> Section:
        def source_of(node: fx.Node) -> Source:
            if stage and self._is_handed(node):
                return Source("carried", index=previous.index(node))
            return self.sizes.get(node) or self.sources[node]

        graph, copies = fx.Graph(), {}
        outside = dict.fromkeys([*self._read(stage), *(n for n in results if self.stage[n] < stage)])
        if stage == 0:
            outside |= dict.fromkeys(n for n in results if n in self.sources)
        for node in self.nodes:
            if node in outside:
                copies[node] = graph.placeholder(node.name)
                copies[node].meta = dict(node.meta)
        sources = [source_of(n) for n in self.nodes if n in outside]
        for node in self.nodes:
            if node in outside or node in self.sources or (self.stage[node] != stage and node not in self.along):
                continue
            if any(n not in copies for n in node.all_input_nodes):
                assert node in self.along, f"{node.name} reads what is not there"
                continue  # numbers of another stage
            copies[node] = (copies[node.all_input_nodes[0]] if node in self.boundaries else
                            graph.node_copy(node, copies.__getitem__))
        graph.output(owned(graph, [copies[n] for n in results]))
        carried = self.section.carried if stage == self.last else [True] * len(results)
        has_gradient = self.section.has_gradient if stage == self.last else [needs_gradient(n) for n in results]
        own = next((s.name for s in sources if stage and s.name in self.rows), None)
        return dataclasses.replace(self.section, name=own.rpartition(".")[0] if own else self.section.name,
                                   graph=LazyGraphModule(self.section.graph, graph), sources=sources,
                                   has_gradient=list(has_gradient), carried=list(carried), layer=self.section.name,
                                   share=self._share(own) if own else Fraction(1))

    def _share(self, name: str) -> Fraction:
        """The share of a layer's experts that the piece with this parameter has."""
        rows = self.rows[name]
        experts = max(each.stop for each in self.rows.values() if each.parameter == rows.parameter)
        return Fraction(rows.stop - rows.first, experts)
