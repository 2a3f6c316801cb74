"""A layer's section, cut where pieces of its experts begin: one section for what comes before them, and one for each piece.

    model.layers.3                        attention, router, shared experts
    model.layers.3.mlp.experts.pieces.0   experts 0 to 31
    model.layers.3.mlp.experts.pieces.1   experts 32 to 63, and the rest of the layer

What a piece reads from earlier ones is handed from section to section. What the layer computes after its experts without
reading them (shared experts) moves to the front; what it computes from their output belongs to the last piece.
"""
from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from megacompile.compat.core import LazyGraphModule
from megacompile.errors import CaptureError
from megacompile.frontend.graph.split import MODES, NUMBERS, Section, needs_gradient, owned, writes
from megacompile.frontend.templates.template import Source
from megacompile.frontend.tracing.layer_calls import source_line
from megacompile.frontend.tracing.layers import LayerStack


# --------------------
# Experts in pieces: a module of very many experts becomes several modules of some of them, whose outputs are added.
#
# A piece is what transformers' expert parallelism gives one of its ranks: experts `first` to `first + count`, and for each
# token the numbers of those of its experts that are in the piece. Tokens sent elsewhere are left out (number `count`) by zeros,
# never by products with zero. Pieces run one after the other, so that only one of them needs to be on the device.
#
# `first` is a tensor that is passed from piece to piece: a constant would make each piece a different graph.
@dataclass(frozen=True)
class Rows:
    """A piece's share of a parameter of all experts. `parameter`: its name in the model; the share is experts `first` to
    `stop`."""

    parameter: str
    first: int
    stop: int


boundary = torch.library.custom_op("megacompile::piece_boundary", lambda value: value.clone(), mutates_args=(),
                                   schema="(Tensor value) -> Tensor")
boundary.register_fake(torch.empty_like)
boundary.register_autograd(lambda _, gradient: gradient)
#: Marks in a model's graph where each piece begins and where the last one ends. `pieces.py` cuts there and removes it.
BOUNDARY = torch.ops.megacompile.piece_boundary


class ExpertPieces(nn.Module):
    """Replaces a module of experts in a model that is captured."""

    def __init__(self, experts: nn.Module, counts: Sequence[int]) -> None:
        super().__init__()
        bounds = itertools.pairwise(itertools.accumulate(counts, initial=0))
        self.pieces = nn.ModuleList(_piece(experts, first, stop) for first, stop in bounds)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [N, hidden]; numbers of experts, int64 [N, k], and their weights [N, k]; returns [N, hidden]."""
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        run = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
        first = torch.zeros((), dtype=torch.int64, device=top_k_index.device)
        total: Any = None
        for piece in self.pieces:
            first = BOUNDARY(first)
            count: Any = piece.num_experts
            number = top_k_index - first
            number = torch.where((number >= 0) & (number < count), number, count)
            part = run(piece, hidden_states, number, top_k_weights)
            total = part if total is None else total + part
            first = first + count
        return BOUNDARY(total)


def _piece(experts: nn.Module, first: int, stop: int) -> nn.Module:
    piece: Any = copy.copy(experts)
    piece._modules, piece._buffers = dict(experts._modules), dict(experts._buffers)
    piece._parameters = {name: nn.Parameter(p.detach()[first:stop].clone(), p.requires_grad)
                         for name, p in experts._parameters.items() if p is not None}
    piece.num_experts, piece._is_expert_parallel = stop - first, True
    return piece


def divisible(experts: nn.Module) -> bool:
    """True if a module consists of experts that transformers can run apart: each of its parameters is one separate tensor
    [experts, ...]. Such modules declare a weight's layout (`is_transposed`). Only recent ones declare whether tokens may be
    sent to other experts (`_is_expert_parallel`)."""
    own = [p for p in experts._parameters.values() if p is not None]
    return (hasattr(experts, "is_transposed") and hasattr(experts, "num_experts") and bool(own)
            and all(p.dim() > 1 and p.shape[0] == experts.num_experts for p in own)
            and len(own) == len(list(experts.parameters())))


def experts_in(stack: LayerStack) -> Iterator[tuple[str, nn.Module]]:
    """The modules of experts in a stack's layers, one for each layer, by qualified name. Excludes modules that an adapter holds
    as its `base_layer`, since the adapter reads their parameters itself."""
    for layer, module in zip(stack.names, stack.layers, strict=True):
        inside = [(f"{layer}.{name}", found) for name, found in module.named_modules() if divisible(found)]
        yield from inside if len(inside) == 1 and not inside[0][0].endswith("base_layer") else ()


def counts_of(experts: int, pieces: int) -> list[int]:
    """The number of experts in each piece, at most one piece for each expert. If it does not divide evenly, the first pieces
    have one more."""
    whole, rest = divmod(experts, min(pieces, experts))
    return [whole + (i < rest) for i in range(min(pieces, experts))]


def split_experts(model: nn.Module, stack: LayerStack, pieces: int) -> None:
    """Replaces each module of experts by `pieces` pieces. Changes `model`."""
    for name, experts in list(experts_in(stack)) if pieces > 1 else ():
        number: Any = experts.num_experts
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, ExpertPieces(experts, counts_of(number, pieces)))


def rows_of(model: nn.Module) -> Mapping[str, Rows]:
    """The share of the model's parameter that each parameter of a piece is, by the parameter's name in a model whose experts
    were split."""
    found: dict[str, Rows] = {}
    for path, module in model.named_modules():
        first = 0
        for number, piece in enumerate(module.pieces if isinstance(module, ExpertPieces) else ()):
            stop = first + int(piece.num_experts)  # type: ignore[arg-type]
            found |= {f"{path}.pieces.{number}.{name}": Rows(f"{path}.{name}", first, stop) for name in piece._parameters}
            first = stop
    return found


_WHOLE = "keep the experts whole (expert_pieces=1)"


def in_pieces(section: Section, rows: Mapping[str, Rows], sizes: Mapping[sympy.Symbol, Source]) -> list[Section]:
    """The sections that `section` is cut into; only itself if its experts are not in pieces. `sizes`: the source of each batch
    size. Raises `CaptureError` if pieces cannot run apart, because one would change another's value in place."""
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

    def _is_from_previous_call(self, node: fx.Node) -> bool:
        """True if a value of an earlier stage comes from the previous call. Every call may read other inputs directly."""
        return node not in self.sizes and (node not in self.sources or self.sources[node].kind == "carried")

    def _handed_on(self, stage: int) -> list[fx.Node]:
        return [n for n in self.nodes if self._is_from_previous_call(n) and self.stage[n] <= stage < self.last_read.get(n, 0)]

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
            if stage and self._is_from_previous_call(node):
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
        """The share of a layer's experts in the piece with this parameter."""
        rows = self.rows[name]
        experts = max(each.stop for each in self.rows.values() if each.parameter == rows.parameter)
        return Fraction(rows.stop - rows.first, experts)
