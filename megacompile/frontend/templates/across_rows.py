"""Finds where a model computes with several sequences of a batch at once: the mean of a batch, scores of every row with every
other.

Such a model computes something else for each half of a batch than for the whole, so its batches are not split. The search is
for ops that are known to do so, on values computed from weights; totals that only end in a number are handled with the loss.
Float8 scales are computed over the whole micro-batch, but they only affect rounding, so they do not count.
Routed experts gather and sort tokens of all rows, but give each token what it would get alone: they are not among these ops.
"""
from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from megacompile.frontend.graph.split import Section
from megacompile.frontend.ops.mixer_ops import mixer_of
from megacompile.frontend.templates.template import LENGTH, Call, Source, Template
from megacompile.frontend.tracing.layer_calls import source_line
from megacompile.ir.precision import FORMATS
from megacompile.ir.tokenwise import MIXING, REDUCING, Layout, is_gemm, is_scaled, packet, tensors

aten = torch.ops.aten

#: Ops that compute each position of a dimension from the others, or leave some out.
_ALONG = {op: MIXING[op] for op in (
    aten.slice, aten.select, aten._softmax, aten._log_softmax, aten.cumsum, aten.topk, aten.sort)} | {
    aten.flip: (1, None), aten.roll: (2, None), aten.cumprod: (1, None), aten.logcumsumexp: (1, None)}
#: Those that choose some positions by their values, and others.
_CHOOSING = {op: _ALONG[op] for op in (aten.topk, aten.sort)} | {
    aten.argmax: (1, None), aten.argmin: (1, None), aten.kthvalue: (2, -1), aten.median: (1, None), aten.mode: (1, -1)}
#: Ops that reduce dimensions: which argument names the dimensions.
_OVER = dict.fromkeys(REDUCING, 1) | {aten.linalg_vector_norm: 2, aten.prod: 1}


def across_rows(template: Template, section: Section) -> str:
    """The name and source line of an operation of `section` on several rows at once, read from its `template`; "" if none is
    known."""
    layout = Layout(template.renaming)
    for node, computed in _computing(template.forward_graph(), template):
        if _mixes(node, computed, layout, layout.batch, template.precision is not None) and not _ends_in_number(node):
            return section.name + _line(section, node, layout)
    return ""


def across_tokens(template: Template) -> bool:
    """True if a template computes with several tokens of a row at once by a convolution, a scan or a shift. Our attention does
    not count, since it knows where a sequence begins. Unknown ops count."""
    return bool(mixing_of_tokens(template, also_numbers=True))


def mixing_of_tokens(template: Template, also_numbers: bool = False) -> str:
    """The name of the first such op; "" if there is none. `also_numbers`: an op whose result is one number counts too."""
    layout = Layout(template.renaming)
    for node, computed in _computing(template.forward_graph(), template):
        if getattr(node.target, "namespace", "") == "megacompile" or mixer_of(node.target) is not None:
            continue
        mixes = _mixes(node, computed, layout, layout.length, template.precision is not None)
        if (mixes or _shifts(node, computed, layout)) and (also_numbers or not _ends_in_number(node)):
            return str(packet(node)).rpartition(".")[2]
    return ""


def mixes_by_itself(template: Template) -> bool:
    """True if a template computes with several tokens of a row, and has none of the mixers that captures know."""
    return not _segments(template.forward_graph()) and across_tokens(template)


def chooses_tokens(template: Template) -> bool:
    """True if a template selects tokens of a row by their values, such as those with the highest scores. In a longer row it may
    select others among equal ones."""
    layout = Layout(template.renaming)
    for node, computed in _computing(template.forward_graph(), template):
        if (op := packet(node)) in _CHOOSING and node.args[0] in computed:
            (scores,) = tensors(node.args[0])  # type: ignore[arg-type]
            if _any_counts(scores, _dims(node, *_CHOOSING[op]), layout, layout.length):
                return True
    return False


def _computing(graph: fx.Graph, template: Template) -> Iterator[tuple[fx.Node, Collection[fx.Node]]]:
    """The ops that read a value computed from weights, and all such values so far."""
    computed = {node for node, described in zip(graph.find_nodes(op="placeholder"), template.inputs, strict=True)
                if described.differentiable or described.role.kind in ("parameter", "carried")}
    for node in graph.nodes:
        if node.op != "call_function" or computed.isdisjoint(node.all_input_nodes):
            continue
        if any(value.is_floating_point() for value in tensors(node)):  # numbers of experts, for example, are not values of rows
            computed.add(node)
        yield node, computed


def _shifts(node: fx.Node, computed: Collection[fx.Node], layout: Layout) -> bool:
    """True if an op mixes or moves tokens within a row (convolutions, padding, concatenation along a row), or is not one of
    PyTorch's own ops."""
    op = packet(node)
    values = [value for each in node.all_input_nodes if each in computed for value in tensors(each)]
    if op in (aten.convolution, aten.constant_pad_nd, aten.unfold, aten.im2col, aten.tril, aten.triu):
        return any(_counts(value, dim, layout, layout.length) for value in values for dim in range(value.dim()))
    if op is aten.cat:
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        return any(_counts(value, dim, layout, layout.length) for value in values)  # type: ignore[arg-type]
    known = getattr(node.target, "namespace", "aten") in ("aten", "prims", "transformers")
    return not known and any(_counts(value, dim, layout, layout.length) for value in values for dim in range(value.dim()))


def _mixes(node: fx.Node, computed: Collection[fx.Node], layout: Layout, symbol: sympy.Symbol, float8: bool) -> bool:
    """True if an op is known to compute with several rows (`symbol` B), or tokens (T), of a value that is `computed`. `float8`:
    whether some maximums are scales of products in float8."""
    op, first = packet(node), node.args[0] if node.args else None
    if is_gemm(node):
        operands = node.args[:2] if is_scaled(node) else node.args[-2:]
        (rows,), (made,) = tensors(operands[0]), tensors(node)  # type: ignore[arg-type]
        return _counts(rows, -1, layout, symbol) or (_counts(made, -1, layout, symbol) and _counts(made, -2, layout, symbol))
    if not isinstance(first, fx.Node) or first not in computed or not tensors(first):
        return False
    value, name = tensors(first)[0], getattr(op, "__name__", "")
    if op is aten.amax and float8 and _is_scale(node):
        return False
    if op in _OVER:
        dims = _dims(node, _OVER[op], None)
    elif op in _ALONG:
        dims = _dims(node, *_ALONG[op])
        if op is aten.slice and tensors(node)[0].shape == value.shape:
            return False
    elif "batch_norm" in name and "no_training" not in name:
        dims = [dim for dim in range(value.dim()) if dim != 1]
    elif name == "attention" or "scaled_dot_product" in name:
        dims = [-2]
    else:
        return False
    return _any_counts(value, dims, layout, symbol)


def _is_scale(node: fx.Node) -> bool:
    """True if a maximum only decides how values are rounded to float8: only scales of products, and values that are limited and
    then cast, are computed from it."""
    pending, scales = list(node.users), False
    while pending:
        user = pending.pop()
        value = user.meta.get("val")
        if is_scaled(user):
            scales = True
            continue
        if user.op != "call_function" or not isinstance(value, Tensor):
            if user.users or user.op == "output":
                return False
        elif value.shape == node.meta["val"].shape:  # still a scale
            pending.extend(user.users)
        elif not all(packet(limit) is aten.clamp and all(_is_float8(cast) for cast in limit.users) for limit in user.users):
            return False
    return scales


def _is_float8(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype in FORMATS.values()


def _dims(node: fx.Node, position: int, default: int | None) -> list[int] | None:
    """The dimensions that an argument names; None: all."""
    given: Any = node.args[position] if len(node.args) > position else node.kwargs.get("dim", default)
    return [given] if isinstance(given, int) else list(given) or None if given is not None else None


def _any_counts(value: Tensor, dims: Collection[int] | None, layout: Layout, symbol: sympy.Symbol) -> bool:
    """True if one of these dimensions (None: of all dimensions) counts a symbol."""
    return any(_counts(value, dim, layout, symbol) for dim in (range(value.dim()) if dims is None else dims))


def _counts(value: Tensor, dim: int, layout: Layout, symbol: sympy.Symbol) -> bool:
    return -value.dim() <= dim < value.dim() and symbol in layout.size(value.shape[dim]).free_symbols


def _ends_in_number(node: fx.Node) -> bool:
    """True if only single numbers are computed from a node's value: a loss, or a part of one."""
    pending, seen = [node], set[fx.Node]()
    while pending:
        each = pending.pop()
        if each.op == "call_function" and any(value.dim() for value in tensors(each)):
            return False
        pending += [user for user in each.users if user not in seen]
        seen.update(each.users)
    return True


def _line(section: Section, node: fx.Node, layout: Layout) -> str:
    """The source line of the Dynamo node that became `node`, since AOT's graphs have no lines. It has the same shape and, if it
    has a name, the same name."""
    shapes = {tuple(map(layout.size, value.shape)) for value in tensors(node)}
    alike = [each for each in section.graph.graph.nodes if each.op in ("call_function", "call_method") and source_line(each)
             and shapes.intersection(tuple(map(layout.size, value.shape)) for value in _values(each))]
    name = getattr(packet(node), "__name__", "").strip("_")
    named = [each for each in alike if name in str(getattr(each.target, "__name__", each.target))]
    return source_line(next(iter(named or alike))) if alike else ""


def _values(node: fx.Node) -> Iterator[Tensor]:
    value = node.meta.get("example_value")
    yield from (v for v in (value if isinstance(value, tuple | list) else (value,)) if isinstance(v, Tensor))


# --------------------
# Finds the inputs from which attention's segments are computed. Some models do not pass position_ids to their mask functions.
# Their attention runs across the sequences of a packed row, as it does natively.


def calls_blind_to(name: str, calls: Sequence[Call], templates: Mapping[str, Template]) -> list[str]:
    """The calls with an attention, a recurrence or a convolution whose segments do not depend on the batch argument `name`.
    `calls`: all calls of a model. The prologue comes first; later calls share its results."""
    prologue = calls[0]
    results = _results(templates[prologue.template])

    def reads(call: Call, node: object) -> bool:
        """True if a value in a call's graph is computed from the argument."""
        return any(_comes_from(name, source, prologue, results) for source in _sources(call, node))

    return [call.name for call in calls
            if not all(reads(call, segments) for segments in _segments(templates[call.template].forward_graph()))]


def calls_across_sequences(name: str, calls: Sequence[Call], templates: Mapping[str, Template]) -> list[str]:
    """The calls in which tokens of a row read each other without knowing from the batch argument `name` where its sequences
    begin: by a recurrence or a convolution, or in attention. A mask of pairs of tokens can tell them, or numbers or flags of
    tokens, such as the sequence that each belongs to."""
    results = _results(templates[calls[0].template])

    def knows(call: Call) -> bool:
        described = zip(call.sources, templates[call.template].inputs, strict=True)
        return any(source.kind == "shared" and _comes_from(name, source, calls[0], results)
                   and (list(given.shape).count(LENGTH) > 1 or (given.dtype is not None and not given.dtype.is_floating_point))
                   for source, given in described)

    blind = {*calls_blind_to(name, calls, templates)}
    mixing = {template: across_tokens(templates[template]) for template in {call.template for call in calls[:-1]}}
    return [call.name for call in calls[:-1] if call.name in blind or (mixing[call.template] and not knows(call))]


def _results(template: Template) -> Sequence[object]:
    results = template.forward_graph().output_node().args[0]
    assert isinstance(results, Sequence)
    return results


def _comes_from(name: str, source: Source, prologue: Call, results: Sequence[object]) -> bool:
    """True if an input of a call is the batch argument, or is computed from it in the prologue."""
    return source.name == name if source.kind == "batch" else source.kind == "shared" and any(
        _comes_from(name, each, prologue, results) for each in _sources(prologue, results[source.index]))


def _segments(graph: fx.Graph) -> list[object]:
    """The segments argument of each mixer in a graph: the sequence of each token. None: it has no segments."""
    calls = [(node, mixer.segments) for node in graph.nodes if node.op == "call_function" and (mixer := mixer_of(node.target))]
    return [None if position is None or len(call.args) <= position else call.args[position] for call, position in calls]


def _sources(call: Call, node: object) -> list[Source]:
    """The inputs of a call that a value in its graph is computed from."""
    if not isinstance(node, fx.Node):
        return []
    seen, pending = {node}, [node]
    while pending:
        new = [each for each in pending.pop().all_input_nodes if each not in seen]
        seen.update(new)
        pending += new
    placeholders = node.graph.find_nodes(op="placeholder")
    return [source for placeholder, source in zip(placeholders, call.sources, strict=True) if placeholder in seen]
