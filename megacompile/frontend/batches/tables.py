"""Embedding tables that a model reads by anything but its tokens, such as learned positions.

A row of such a table that does not exist is an error on a CPU. On a GPU, the kernel that reads it makes the device useless to
the process. So a batch is checked on the host, before anything runs.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from megacompile.errors import MegacompileError
from megacompile.frontend.graph.batch_totals import free_symbols, size_symbols
from megacompile.frontend.graph.loss import TargetCount, count_batch
from megacompile.frontend.templates.template import Source
from megacompile.frontend.tracing.model_graph import ModelGraph, called_name

#: Arguments that decide rows of a table by their length alone, or by which tokens they hide.
_OF_LENGTH = frozenset({"input_ids", "attention_mask"})
_TOKENS = Source("batch", "input_ids")


@dataclasses.dataclass(frozen=True)
class EmbeddingTable:
    """`name`: the parameter. `rows`: how many it has. `bounds`: computes the least and the largest row that a batch reads,
    int64 [2]."""

    name: str
    rows: int
    bounds: TargetCount

    def missing(self, batch: Mapping[str, Tensor]) -> int | None:
        """A row that a batch reads and the table does not have; None if it has all of them."""
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
    """The tables that a model reads by values that the host can compute from a batch. Tokens are left out: they have a check
    of their own. So are values of pairs of tokens, such as their distances, which would take the host too long."""
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
