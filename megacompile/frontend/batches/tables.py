"""Embedding tables that a model reads by anything but its tokens, such as learned positions.

A row of such a table that does not exist is an error on a CPU. On a GPU, the kernel that reads it makes the device useless to
the process. So a batch is checked on the host, before anything runs.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from megacompile.errors import MegacompileError
from megacompile.frontend.graph.loss import TargetCount, count_batch
from megacompile.frontend.graph.split import writes
from megacompile.frontend.templates.template import Source
from megacompile.frontend.tracing.layer_calls import source_line
from megacompile.frontend.tracing.model_graph import ModelGraph, called_name

# --------------------
# Values that a model computes from all rows of a batch's arguments: the largest position, which decides the frequencies of
# LongRoPE, or the first row of a mask.
#
# A micro-batch would give another value. So the value is computed from the whole batch on the host, like the number of target
# tokens, and is an input of the calls that read it.
_REDUCING = frozenset({"max", "amax", "min", "amin", "sum", "mean", "any", "all", "prod"})
Symbols = Collection[sympy.Symbol]


def take_totals(model: ModelGraph) -> tuple[tuple[TargetCount, ...], str]:
    """Rewrites `model` so that totals of a batch are placeholders, with the source "total" and a number. Returns how each is
    computed, and "". If the host cannot compute one from the batch alone, returns () and the line that makes it, with `model`
    unchanged."""
    rows = size_symbols(model, 0)
    derived = {node for node, source in model.sources.items() if source.kind == "batch" and _has(node, rows)}
    totals = [node for node in _made(model, derived, rows) if _matters(node, rows)]
    found: list[tuple[fx.Node, TargetCount]] = []
    for node in totals:
        count = None if any(writes(user) and user.args[0] is node for user in node.users) else count_batch(
            model, node, lambda graph, value: value, node.meta["example_value"].dtype)
        if count is None:
            return (), f"what it makes of its arguments{source_line(node)}"
        found.append((node, count))
    for number, (node, _) in enumerate(found):
        with model.graph.graph.inserting_after(model.graph.graph.find_nodes(op="placeholder")[-1]):
            given = model.graph.graph.placeholder(f"total_{number}")
        value = node.meta["example_value"]
        with model.fakes:
            given.meta["example_value"] = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        model.sources[given] = Source("total", index=number)
        node.replace_all_uses_with(given)  # the node stays, so that the model still reads its argument
    model.graph.recompile()
    return tuple(count for _, count in found), ""


def counts_positions(model: ModelGraph) -> bool:
    """True if a model computes with a number that depends on all positions of a row. It would differ for a longer row,
    including padding."""
    positions = size_symbols(model, 1)
    weights = {node for node, source in model.sources.items() if source.kind in ("parameter", "buffer")}
    derived = {node for node in model.graph.graph.nodes if node not in weights and _has(node, positions)}
    return any(called_name(node) in _REDUCING and not _has(node, size_symbols(model, 0)) and _matters(node, positions)
               for node in _made(model, derived, positions))


def _made(model: ModelGraph, derived: set[fx.Node], symbols: Symbols) -> Iterator[fx.Node]:
    """The first values made from `derived` ones, and from no weight, whose sizes do not contain `symbols`. Adds the values in
    between to `derived`."""
    trained = {node for node, source in model.sources.items() if source.kind == "parameter"}
    for node in model.graph.graph.nodes:
        if node.op == "output" or not trained.isdisjoint(node.all_input_nodes):
            trained.add(node)
        elif not derived.isdisjoint(node.all_input_nodes) and not _makes_constants(node):
            value = node.meta.get("example_value")
            if isinstance(value, Tensor) and not _has(node, symbols):
                yield node
            elif isinstance(value, Tensor | tuple | list):
                derived.add(node)


def _makes_constants(node: fx.Node) -> bool:
    """True if a node only reads a value's size, dtype and device: new_ones, zeros_like."""
    return called_name(node).startswith("new_") or called_name(node).endswith("_like")


def _matters(node: fx.Node, symbols: Symbols) -> bool:
    """True if values of tokens are computed from a node. Totals that only end in a number are handled with the loss."""
    pending, seen = [node], {node}
    while pending:
        each = pending.pop()
        if _has(each, symbols):
            return True
        pending += [user for user in each.users if user not in seen]
        seen.update(each.users)
    return False


def size_symbols(model: ModelGraph, dimension: int) -> set[sympy.Symbol]:
    """The symbols of this dimension of batch arguments."""
    shapes = [node.meta["example_value"].shape for node, source in model.sources.items() if source.kind == "batch"]
    return set().union(*(free_symbols(shape[dimension]) for shape in shapes if len(shape) > dimension))


def _has(node: fx.Node, symbols: Symbols) -> bool:
    value: Any = node.meta.get("example_value")
    tensors = value if isinstance(value, tuple | list) else (value,)
    return any(not free_symbols(size).isdisjoint(symbols)
               for each in tensors if isinstance(each, Tensor) for size in each.shape)


def free_symbols(size: int | torch.SymInt) -> set[sympy.Symbol]:
    """The symbols that a size is made of; none for a number."""
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()


#: Arguments that decide rows of a table by their length alone, or by which tokens they hide.
_OF_LENGTH = frozenset({"input_ids", "attention_mask"})
_TOKENS = Source("batch", "input_ids")


@dataclasses.dataclass(frozen=True)
class EmbeddingTable:
    """`name`: the parameter. `rows`: the number of its rows. `bounds`: computes the smallest and the largest row that a batch
    reads, int64 [2]."""

    name: str
    rows: int
    bounds: TargetCount

    def missing(self, batch: Mapping[str, Tensor]) -> int | None:
        """A row that a batch reads and the table does not have; None if it has all."""
        least, largest = self.bounds.on_host(batch).tolist()
        return next((row for row in (largest, least) if not 0 <= row < self.rows), None)

    def check(self, name: str, batch: Mapping[str, Tensor]) -> None:
        """Raises `MegacompileError` for a batch that reads a row which the table does not have."""
        row = self.missing(batch)
        if row is not None:
            given = [s.name for s in self.bounds.sources if s.kind == "batch" and s.name not in _OF_LENGTH]
            remedy = f"pass {' and '.join(given)} within these" if given else "pass shorter sequences"
            raise MegacompileError(f"{name}: the batch reads row {row} of {self.name}, which has only the rows 0 to "
                                   f"{self.rows - 1}: {remedy}")


def find_tables(graph: ModelGraph) -> tuple[EmbeddingTable, ...]:
    """The tables that a model reads at values that the host can compute from a batch. Excludes tokens, which have a separate
    check, and values of pairs of tokens, such as their distances, which would take the host too long."""
    lengths = size_symbols(graph, 1)
    found: dict[tuple[str, fx.Node], EmbeddingTable] = {}
    for node in graph.graph.graph.nodes:
        if called_name(node) != "embedding":
            continue
        indices, weight = node.args[:2]
        source = graph.sources.get(weight)
        if source is None or source.kind != "parameter" or graph.sources.get(indices) == _TOKENS:
            continue
        if sum(not lengths.isdisjoint(free_symbols(size)) for size in indices.meta["example_value"].shape) > 1:
            continue
        if (source.name, indices) not in found and (bounds := count_batch(graph, indices, _bounds, torch.int64)) is not None:
            found[source.name, indices] = EmbeddingTable(source.name, weight.meta["example_value"].shape[0], bounds)
    return tuple(found.values())


def _bounds(graph: fx.Graph, indices: Any) -> Any:
    return graph.call_function(torch.stack, ([graph.call_method("amin", (indices,)), graph.call_method("amax", (indices,))],))
