"""Features that a model puts in the place of tokens, by `masked_scatter`: of images, in the places that its processor left for
them.

A batch is split by rows, and features go to places in the order of both, so every row must have as many places as its image has
features. The model's own check is of whole batches, and on a device it is no error that anybody could catch: rows are checked
on the host instead, before anything runs.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import sympy
import torch
from torch import Tensor, fx

from megacompile.errors import UnsupportedError
from megacompile.frontend.loss import TargetCount, count_batch
from megacompile.frontend.model_graph import ModelGraph
from megacompile.frontend.split import source_line


@dataclasses.dataclass(frozen=True)
class Places:
    """`count`: the places of each row, float32 [batch]; `features`: how many there must be."""

    count: TargetCount
    features: int

    def check(self, name: str, batch: Mapping[str, Tensor]) -> None:
        """Raises `UnsupportedError` for a row that has more places or fewer."""
        given = {source.name: batch[source.name].cpu() for source in self.count.sources}
        wrong = (self.count(given) != self.features).nonzero().flatten().tolist()
        if wrong:
            found = int(self.count(given)[wrong[0]])
            raise UnsupportedError(
                f"{name}: sequence {wrong[0]} of the batch has {found} places for an image's features, and an image has "
                f"{self.features}: give every sequence exactly one image (a model streamed without images in its example "
                "trains on text alone)")


def places_of(graph: ModelGraph, name: str) -> tuple[Places, ...]:
    """Every `masked_scatter` of a model. Raises `UnsupportedError` where the number of features is not the same for all rows,
    or the places are not to be read off the batch."""
    return tuple(_place(graph, node, name) for node in graph.graph.graph.nodes
                 if node.target in ("masked_scatter", torch.masked_scatter))


def _place(graph: ModelGraph, node: fx.Node, name: str) -> Places:
    places: fx.Node = node.args[1]  # type: ignore[assignment]
    values, mask, features = (_elements(each) for each in node.all_input_nodes[:3])
    rows = _size(places.meta["example_value"].shape[0])
    each = sympy.simplify(features * mask / values / rows)
    count = count_batch(graph, places, lambda g, t: g.call_method("sum", (g.call_method("flatten", (t, 1)), 1)))
    if count is None or not isinstance(each, sympy.Integer):
        raise UnsupportedError(
            f"{name} puts features among its tokens that are not as many for each sequence, or in places that its arguments "
            f"do not say: stream it for text alone, without images in the example{source_line(node)}")
    return Places(count, int(each))


def _elements(node: fx.Node) -> sympy.Expr:
    return _size(node.meta["example_value"].numel())


def _size(size: int | torch.SymInt) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
