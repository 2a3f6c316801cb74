"""Dropout as a function of counters: the same masks in a forward and in its recompute, under any plan.

`draw_functionally` replaces every dropout of a model's graph by one that only reads an input, `random`: int64 [5],

    seed of the step, number of the call, first row of the micro-batch, its rows, rows of the whole batch

Whether an element is dropped depends on the seed, on where in the model it is dropped, and on its place in the whole batch. It
is the same for every split into micro-batches, and nothing is kept for the backward. The bits are those of SplitMix64 at a
counter; native PyTorch draws other bits from the same distribution.
"""
from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from megacompile.frontend.graph.split import INVOKE, Section
from megacompile.frontend.templates.template import Source
from megacompile.frontend.tracing.model_graph import ModelGraph

RANDOM = Source("random")
#: An upper bound on the draws of one call.
_SITES = 1 << 20
_GOLDEN, _FIRST, _SECOND = (n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mixed(bits: Tensor) -> Tensor:
    """SplitMix64's finalizer for int64."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        bits = (bits ^ _shifted(bits, shift)) * factor
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, shift: int) -> Tensor:
    """Shifts right and fills with zeros."""
    return torch.bitwise_right_shift(bits, shift) & ((1 << (64 - shift)) - 1)


def kept(shape: Sequence[Any], random: Tensor, p: float, site: int, batch_dim: int | None) -> Tensor:
    """A bool mask of a tensor of `shape`: True for elements that stay, each with probability 1 - p. `site` distinguishes the
    draws of one call. `batch_dim` is the dimension that counts rows (None: there is none, and the mask is the same for all
    rows)."""
    seed, call, first, rows, every = random.unbind(0)
    index = torch.zeros((), dtype=torch.int64, device=random.device)
    for dim, size in enumerate(shape):
        index_in_row = torch.arange(size, device=random.device)
        whole = size
        if dim == batch_dim:
            index_in_row, whole = index_in_row + first * size // rows, size * every // rows
        index = index[..., None] * whole + index_in_row
    key = _mixed(seed + _GOLDEN * (call * _SITES + site + 1))
    return (_mixed(index * _GOLDEN + key) & ((1 << 31) - 1)) >= round(p * (1 << 31))


def dropout(x: Tensor, random: Tensor, p: float, site: int, batch_dim: int | None) -> Tensor:
    """`x` with elements set to zero at random, the others divided by 1 - p."""
    mask = kept(x.shape, random, p, site, batch_dim).to(x.dtype)
    return x * (mask / (1 - p) if p < 1 else mask)


def attention_with_dropout(
    random: Tensor, site: int, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` of [B, H, T, D], op by op, with our dropout of the weights. Holds scores [B, H, T, T]."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = (query @ key.transpose(-2, -1)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    # A query that sees nothing has no weights.
    return dropout(torch.ops.aten._safe_softmax(scores, -1), random, dropout_p, site, 0) @ value


def draw_functionally(model: ModelGraph) -> None:
    """Makes every active dropout of `model`, in its layers and around them, read `random`, a new placeholder. Other ops that
    draw random numbers stay as they are."""
    calls = model.graph.graph.find_nodes(op="call_function", target=INVOKE)
    regions = {str(call.args[0].target): getattr(model.graph, str(call.args[0].target)) for call in calls}  # type: ignore[union-attr]
    drawing = {name for name, region in regions.items() if _replace(model, region.graph, lambda g: _placeholder(model, g))}
    top = model.graph.graph
    random = next(iter(_replace(model, top, lambda g: _placeholder(model, g))), None)
    if drawing and random is None:
        random = _placeholder(model, top)
    for call in calls:
        if call.args[0].target in drawing:  # type: ignore[union-attr]
            call.args = (*call.args, random)
    if random is not None:
        model.sources[random] = RANDOM
    for graph in (*regions.values(), model.graph):
        graph.recompile()


def number_draws(section: Section) -> None:
    """Gives each draw of a call its own number (`site`)."""
    draws = [n for n in section.graph.graph.nodes if n.target in (dropout, attention_with_dropout)]
    for site, node in enumerate(draws):
        node.kwargs = {**node.kwargs, "site": site}
    section.graph.recompile()


def _placeholder(model: ModelGraph, graph: fx.Graph) -> fx.Node:
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        node = graph.placeholder("random")
    with model.fakes:
        node.meta["example_value"] = torch.empty(len(("seed", "call", "first", "rows", "every")), dtype=torch.int64)
    return node


def _replace(model: ModelGraph, graph: fx.Graph, make: Any) -> list[fx.Node]:
    """Replaces the dropouts of a graph. Returns the placeholder that they read, made by `make`, if there are any dropouts."""
    made: list[fx.Node] = []
    for node in list(graph.nodes):
        given = _arguments(node)
        if given is None:
            continue
        made = made or [make(graph)]
        with graph.inserting_before(node):
            if node.target is F.dropout:
                x = given["input"]
                new = graph.call_function(dropout, (x, made[0], given["p"]), {
                    "site": 0, "batch_dim": _batch_dim(model, x.meta["example_value"])})
            else:
                new = graph.call_function(attention_with_dropout, (), {**given, "random": made[0], "site": 0})
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    return made


_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _arguments(node: fx.Node) -> dict[str, Any] | None:
    """The arguments of an active dropout by name; None for any other node, and for a dropout in place."""
    if node.op != "call_function":
        return None
    if node.target is F.dropout:
        bound = inspect.signature(F.dropout).bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        return given if given["training"] and given["p"] and not given["inplace"] else None
    if node.target is F.scaled_dot_product_attention:
        given = dict(zip(_SDPA, node.args, strict=False)) | dict(node.kwargs)
        return given if given.get("dropout_p") else None
    return None


def _batch_dim(model: ModelGraph, value: Tensor) -> int | None:
    """The dimension whose size is B or a multiple of it."""
    batch = next(n.meta["example_value"] for n, s in model.sources.items() if s.kind == "batch").shape[0]
    if not isinstance(batch, torch.SymInt):
        return 0
    symbols = model.shape_env.simplify(batch.node.expr).free_symbols
    found = [dim for dim, size in enumerate(value.shape) if isinstance(size, torch.SymInt)
             and symbols & model.shape_env.simplify(size.node.expr).free_symbols]
    return found[0] if found else None
