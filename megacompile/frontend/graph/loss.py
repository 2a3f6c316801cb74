"""The loss as a sum over target tokens, divided by a denominator that is an input.

The mean over a micro-batch is not the mean over the batch. So the epilogue computes `sum / loss_denominator`. The denominator
is an input: the whole batch's number of target tokens, which `TargetCount` computes from the labels with the model's own shift
and ignore_index, or the user's `num_items_in_batch`.
"""
from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from megacompile.frontend.graph.split import Section, extract
from megacompile.frontend.templates.joint import cut_graph, forward_graph
from megacompile.frontend.templates.template import Source
from megacompile.frontend.tracing.model_graph import ModelGraph

DENOMINATOR, SHARE = Source("loss_denominator"), Source("share")
_OF_ELEMENTS = frozenset({F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
                          F.binary_cross_entropy_with_logits})


@dataclasses.dataclass(frozen=True)
class TargetCount:
    """Counts the target tokens of a batch on the host: called with {name: tensor}, it returns a 0-d float32 tensor. It can also
    compute other values of the batch, in its `dtype`. `counts_targets`: it counts exactly the targets that a cross entropy does
    not ignore."""

    graph: fx.GraphModule
    sources: tuple[Source, ...]
    dtype: torch.dtype = torch.float32
    counts_targets: bool = False

    def __call__(self, batch: Mapping[str, Tensor]) -> Tensor:
        inputs = [batch[s.name] if s.kind == "batch" else batch[s.name].shape[s.index] for s in self.sources]
        with torch.no_grad():
            (count,) = self.graph(*inputs)
        return torch.as_tensor(count, dtype=self.dtype)  # a plain number where it is a size of the batch

    def on_host(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Like a call, for a batch that may be on a device. Copies the arguments whose values are read."""
        return self({**batch, **{s.name: batch[s.name].cpu() for s in self.sources if s.kind == "batch"}})


def normalize_loss(model: ModelGraph, loss: fx.Node) -> TargetCount | None:
    """Rewrites `model` so that `loss` is a cross entropy's sum over the loss denominator, a new last placeholder.

    Recognizes a mean over target tokens or over elements of targets, and a sum divided by something computed from the batch
    alone. Each may then be cast, and multiplied or divided by numbers. If such a loss is added to others that are not sums over
    tokens (an auxiliary loss of routers), these are weighted by the micro-batch's share of the batch.

    Returns how to count targets, or None with the graph unchanged."""
    node = loss
    others: list[tuple[fx.Node, fx.Node]] = []
    while (inner := _scaled(node) or _addend(node, others)) is not None:
        node = inner
    count = _normalize(model, node)
    if count is not None:
        _weigh(model, others)
    return count


def is_averaged(model: ModelGraph) -> bool:
    """True if a part of the loss is the mean of the micro-batches' values."""
    return SHARE in model.sources.values()


def _normalize(model: ModelGraph, node: fx.Node) -> TargetCount | None:
    if node.target is F.cross_entropy:
        return _normalize_mean(model, node)
    if node.target in _OF_ELEMENTS:
        return _normalize_elements(model, node)
    if node.target in (operator.truediv, torch.div) and isinstance(node.args[1], fx.Node) and not node.kwargs:
        return _normalize_sum(model, *node.args)  # type: ignore[arg-type]
    return None


def _addend(node: fx.Node, others: list[tuple[fx.Node, fx.Node]]) -> fx.Node | None:
    """If `node` adds two values, the one that contains a cross entropy. The other one is appended to `others`, with `node`."""
    if node.target not in (operator.add, operator.iadd, torch.add) or len(node.args) != 2 or len(node.all_input_nodes) != 2:
        return None
    found = [each for each in node.all_input_nodes if _holds_targets(each)]
    if len(found) != 1:
        return None
    others.extend((each, node) for each in node.all_input_nodes if each is not found[0])
    return found[0]


def _holds_targets(node: fx.Node) -> bool:
    """True if one of the values that `node` adds up is a loss over targets, possibly scaled."""
    while (scaled := _scaled(node)) is not None:
        node = scaled
    if node.target in (operator.add, operator.iadd, torch.add):
        return any(map(_holds_targets, node.all_input_nodes))
    divided = node.args[0] if node.target in (operator.truediv, torch.div) and node.all_input_nodes else node
    return isinstance(divided, fx.Node) and divided.target in {F.cross_entropy, *_OF_ELEMENTS}


def _weigh(model: ModelGraph, others: Sequence[tuple[fx.Node, fx.Node]]) -> None:
    """Multiplies the other addend of each sum by the micro-batch's share."""
    share = _scalar(model, "share", SHARE) if others else None
    for other, total in others:
        with model.graph.graph.inserting_before(total):
            weighted = model.graph.graph.call_function(operator.mul, (other, share))
            weighted.meta = dict(other.meta)
        total.replace_input_with(other, weighted)
    model.graph.recompile()


def _normalize_elements(model: ModelGraph, node: fx.Node) -> TargetCount | None:
    """Handles a mean over the elements of targets (`mse_loss` and similar), with the same number of elements in every row."""
    bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    bound.apply_defaults()
    given = bound.arguments
    alike = given["input"].meta["example_value"].shape == given["target"].meta["example_value"].shape
    if given["reduction"] != "mean" or not alike or any(given[key] is not None for key in ("size_average", "reduce", "weight")
                                                       if key in given):
        return None
    count = count_batch(model, given["target"], lambda g, t: g.call_method("numel", (t,)))
    if count is None:
        return None
    node.args, node.kwargs = (), {**given, "reduction": "sum"}
    _divided(model, node, node)
    return count


def _divided(model: ModelGraph, loss: fx.Node, total: fx.Node) -> None:
    """Replaces `loss` by `total` over the loss denominator for all its readers."""
    loss_denominator = _scalar(model, "loss_denominator", DENOMINATOR)
    with model.graph.graph.inserting_after(total):
        mean = model.graph.graph.call_function(operator.truediv, (total, loss_denominator))
        mean.meta = dict(loss.meta)
    loss.replace_all_uses_with(mean, delete_user_cb=lambda user: user is not mean)
    model.graph.recompile()


def _scaled(node: fx.Node) -> fx.Node | None:
    """The value that a node casts, or multiplies by a number. Sums over micro-batches commute with this."""
    if node.op == "call_method" and node.target in ("to", "float"):
        return node.args[0]  # type: ignore[return-value]
    if (node.target not in (operator.mul, operator.truediv, torch.mul, torch.div) or node.kwargs
            or len(node.all_input_nodes) != 1):
        return None
    (scaled,) = node.all_input_nodes
    numbers = [a for a in node.args if a is not scaled]
    divided = node.target in (operator.truediv, torch.div)
    fits = len(numbers) == 1 and isinstance(numbers[0], int | float) and not (divided and node.args[0] is not scaled)
    return scaled if fits else None


def cross_entropy_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an `F.cross_entropy` call by name, defaults filled in."""
    bound = inspect.signature(F.cross_entropy).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _sums_over_targets(arguments: dict[str, Any], reduction: str) -> bool:
    target = arguments["target"].meta["example_value"]
    return (arguments["reduction"] == reduction and arguments["weight"] is None and arguments["size_average"] is None
            and arguments["reduce"] is None and not target.is_floating_point())


def _normalize_mean(model: ModelGraph, node: fx.Node) -> TargetCount | None:
    arguments = cross_entropy_arguments(node)
    if not _sums_over_targets(arguments, "mean"):
        return None
    graph, target = model.graph.graph, arguments["target"]
    count = count_batch(model, target, lambda g, t: g.call_function(
        torch.sum, (g.call_function(operator.ne, (t, arguments["ignore_index"])),)))
    if count is None:
        return None
    with graph.inserting_after(node):
        total = graph.call_function(F.cross_entropy, (arguments["input"], target), {
            "ignore_index": arguments["ignore_index"], "reduction": "sum",
            "label_smoothing": arguments["label_smoothing"]})
        total.meta = dict(node.meta)
    _divided(model, node, total)
    graph.erase_node(node)
    model.graph.recompile()
    return dataclasses.replace(count, counts_targets=True)


def _normalize_sum(model: ModelGraph, total: fx.Node, divisor: fx.Node) -> TargetCount | None:
    if total.target is not F.cross_entropy or not _sums_over_targets(cross_entropy_arguments(total), "sum"):
        return None
    count = count_batch(model, divisor, lambda g, t: t)
    if count is None:
        return None
    division = next(iter(total.users))
    division.replace_input_with(divisor, _scalar(model, "loss_denominator", DENOMINATOR))
    model.graph.recompile()
    return count


def _scalar(model: ModelGraph, name: str, source: Source) -> fx.Node:
    """A new last placeholder, a 0-d float32 tensor."""
    graph = model.graph.graph
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        node = graph.placeholder(name)
    with model.fakes:
        node.meta["example_value"] = torch.empty((), dtype=torch.float32)
    model.sources[node] = source
    return node


def count_batch(model: ModelGraph, counted: fx.Node, finish: Any, dtype: torch.dtype = torch.float32) -> TargetCount | None:
    """`finish(graph, counted)` as a function of the batch, in this dtype; None if `counted` is computed from anything else.
    Copies all nodes computed from the batch alone in order, including in-place ops (labels[mask] = -100). Those that the count
    does not need are dropped once the graph is functional."""
    batch_only = {n for n, s in model.sources.items() if s.kind in ("batch", "size")}
    nodes = []
    for node in model.graph.graph.nodes:
        if node.op in ("call_function", "call_method") and node not in batch_only and node.all_input_nodes and all(
                a in batch_only for a in node.all_input_nodes):
            batch_only.add(node)
            nodes.append(node)
    if counted not in batch_only:
        return None

    def source_of(node: fx.Node) -> Source:
        return model.sources[node]

    section: Section = extract("target count", model, nodes, [counted], source_of, [])
    graph = section.graph.graph
    output = graph.output_node()
    with graph.inserting_before(output):
        output.args = ((finish(graph, output.args[0][0]),),)  # type: ignore[index]
    section.graph.recompile()
    functional = forward_graph(section.graph, model.fakes)
    counting = cut_graph(functional.graph, functional.inputs, functional.outputs)
    read = []
    for node, source in zip(counting.graph.find_nodes(op="placeholder"), section.sources, strict=True):
        if node.users:
            read.append(source)
        else:
            counting.graph.erase_node(node)
    counting.recompile()
    return TargetCount(counting, tuple(read), dtype)
