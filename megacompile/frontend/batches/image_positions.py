"""Features that a model writes over tokens with `masked_scatter`, such as image features at the positions that the processor
reserved.

`masked_scatter` takes features in the order of all rows, so the features of a row would depend on how many images earlier rows
have. Here every row has the same number of images (missing ones are made up), and takes its features from the first of its own
images (`_take_by_rows`). The model's own check looks at whole batches, and on a device its failure is not an error that a
caller can catch. So rows are checked on the host, before anything runs.
"""
from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from megacompile.compat.core import enable_python_dispatcher
from megacompile.errors import UnsupportedError
from megacompile.frontend.graph.loss import TargetCount, count_batch
from megacompile.frontend.graph.split import source_line
from megacompile.frontend.tracing.model_graph import ModelGraph

_SCATTERS = ("masked_scatter", torch.masked_scatter)


@dataclasses.dataclass(frozen=True)
class ImagePositions:
    """`count`: counts the reserved positions of each row, float32 [batch]. `features`: how many an image has. `images`: the
    batch arguments that the features come from, or () if every row must have the positions of exactly one image."""

    count: TargetCount
    features: int
    images: tuple[str, ...]

    def numbers(self, name: str, batch: Mapping[str, Tensor]) -> list[int]:
        """How many images each row has positions for. Raises `UnsupportedError` for a row whose positions are not those of
        whole images or, without `images`, of one image."""
        counted = self.count.on_host(batch)
        fits = counted % self.features == 0 if self.images else counted == self.features
        for row in (~fits).nonzero().flatten().tolist():
            remedy = "give every image all of its tokens" if self.images else "give every sequence exactly one image"
            raise UnsupportedError(
                f"{name}: sequence {row} of the batch has {int(counted[row])} placeholder tokens for images, and one image "
                f"needs {self.features}: {remedy} (a model streamed without images in its example trains on text alone)")
        return (counted / self.features).int().tolist()


def find_image_positions(graph: ModelGraph, name: str, images: Collection[str], each: int) -> tuple[ImagePositions, ...]:
    """Where every `masked_scatter` of a model puts features; `images` are batch arguments with `each` images for every row.
    Rewrites the graph so that each row takes its own images' features. Raises `UnsupportedError` if the number of features
    differs among rows, or the positions cannot be computed from the batch."""
    scatters = [n for n in graph.graph.graph.nodes if n.target in _SCATTERS]
    return tuple(_image_positions(graph, node, name, images, each) for node in scatters)


def _image_positions(graph: ModelGraph, node: fx.Node, name: str, images: Collection[str], each: int) -> ImagePositions:
    tokens, mask, features = node.args
    assert isinstance(tokens, fx.Node) and isinstance(mask, fx.Node) and isinstance(features, fx.Node)
    of_tokens = _of_tokens(mask)
    elements = sympy.simplify(_elements(features) / _size(tokens.meta["example_value"].shape[0]))
    width = _size(tokens.meta["example_value"].shape[-1])
    count = count_batch(graph, of_tokens, lambda g, t: g.call_method("sum", (g.call_method("flatten", (t, 1)), 1)))
    if (count is None or of_tokens.meta["example_value"].shape[-1] != 1 or not isinstance(elements, sympy.Integer)
            or not isinstance(width, sympy.Integer) or elements % (width * each)):
        raise _unknown(name, node)
    own = tuple(n for n in images if n in _read(graph, features))
    if own:
        _take_by_rows(graph, node, tokens, of_tokens, features, int(elements), int(width))
    return ImagePositions(count, int(elements / width) // each, own)


def _unknown(name: str, node: fx.Node) -> UnsupportedError:
    return UnsupportedError(
        f"{name} puts another number of features into each sequence, or at positions that its arguments do not "
        f"determine: stream it for text alone, without images in the example{source_line(node)}")


def _of_tokens(mask: fx.Node) -> fx.Node:
    """The mask [B, T, 1] that `mask` may be expanded from."""
    while mask.target in ("expand", "expand_as", "to") and mask.all_input_nodes[0].meta["example_value"].dtype == torch.bool:
        mask = mask.all_input_nodes[0]
    return mask


def _read(graph: ModelGraph, node: fx.Node) -> set[str]:
    """The batch arguments that a value is computed from."""
    seen, pending = {node}, [node]
    while pending:
        for argument in pending.pop().all_input_nodes:
            if argument not in seen:
                seen.add(argument)
                pending.append(argument)
    return {graph.sources[n].name for n in seen if n in graph.sources and graph.sources[n].kind == "batch"}


#: Ops that pass features on unchanged, one for each token. Only the last gives them the shape of tokens.
_PASSING = ("flatten", "split", "to", operator.getitem, torch.cat, "view_as")


def take_aligned(graph: ModelGraph, name: str) -> dict[int, TargetCount]:
    """Rewrites the graph to take features of patch encoders from their ops' outputs, which have them at the right positions
    already. Returns, by the encoder's number, how a batch's positions for its features are computed: float32 [batch, length],
    1 at each. Raises `UnsupportedError` if the batch's arguments do not determine them, or the features are used for more than
    being placed."""
    found: dict[int, TargetCount] = {}
    encoded = torch.ops.megacompile.encode_patches
    for encoder in [node for node in graph.graph.graph.nodes if node.target is encoded]:
        for node in _readers(encoder):
            if node.target not in _SCATTERS:
                raise _unknown(name, node)
            tokens, mask, features = node.args
            assert isinstance(mask, fx.Node), "an argument of masked_scatter"
            count = count_batch(graph, _of_tokens(mask), lambda g, t: g.call_method("squeeze", (t, -1)))
            if count is None:
                raise _unknown(name, node)
            found[encoder.args[4]] = count
            with _calls_before(graph, node) as call:
                placed = call("reshape", features, *(call("size", tokens, dim) for dim in range(3)))
                node.replace_all_uses_with(call(torch.where, mask, placed, tokens))
            graph.graph.graph.erase_node(node)
    graph.graph.recompile()
    return found


def _readers(features: fx.Node) -> list[fx.Node]:
    """The nodes that read features which are passed on unchanged, except those that add them to tokens."""
    readers = []
    for user in features.users:
        if user.target not in _PASSING or (user.target is torch.cat and len(user.all_input_nodes) > 1):
            readers.append(user)
        elif user.target != "view_as":
            readers += _readers(user)
    return readers


@contextlib.contextmanager
def _calls_before(graph: ModelGraph, node: fx.Node) -> Iterator[Callable[..., fx.Node]]:
    """A context that yields a function. It adds calls of functions or methods before `node`."""
    inner = graph.graph.graph

    def call(target: str | Callable[..., Any], *args: Any) -> fx.Node:
        made = inner.call_method(target, args) if isinstance(target, str) else inner.call_function(target, args)
        given = fx.map_arg(args, lambda n: n.meta["example_value"])
        made.meta = {**node.meta, "example_value": (
            getattr(given[0], target)(*given[1:]) if isinstance(target, str) else target(*given))}
        return made

    with graph.fakes, torch.enable_grad(), enable_python_dispatcher(), inner.inserting_before(node):
        yield call


def _take_by_rows(graph: ModelGraph, node: fx.Node, tokens: fx.Node, mask: fx.Node, features: fx.Node, elements: int,
                   width: int) -> None:
    """Rewrites `node` so that the n-th position of a row gets the n-th of the row's own features, `elements` in all."""
    with _calls_before(graph, node) as call:
        rank = call("sub", call("cumsum", call("long", call("squeeze", mask, -1)), 1), 1)
        first = call("mul", call("unsqueeze", call(torch.arange, call("size", mask, 0)), 1), elements // width)
        index = call("add", call("clamp", rank, 0), first)
        placed = call(F.embedding, index, call("reshape", features, -1, width))
        node.replace_all_uses_with(call(torch.where, mask, placed, tokens))
    graph.graph.graph.erase_node(node)
    graph.graph.recompile()


def _elements(node: fx.Node) -> sympy.Expr:
    return _size(node.meta["example_value"].numel())


def _size(size: int | torch.SymInt) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
