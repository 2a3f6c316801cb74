"""Which inputs attention's segments are computed from. Some models do not pass position_ids to their mask functions: their
attention runs across the sequences of a packed row, as it does natively."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from megacompile.frontend.templates.across_rows import across_tokens
from megacompile.frontend.templates.template import LENGTH, Call, Source, Template

_SEGMENTS = 7  # which argument of the op


def calls_blind_to(name: str, calls: Sequence[Call], templates: Mapping[str, Template]) -> list[str]:
    """The calls with an attention whose segments do not depend on the batch argument `name`. `calls`: all calls of a model.
    The prologue comes first; later calls share its results."""
    prologue = calls[0]
    results = _results(templates[prologue.template])

    def reads(call: Call, node: object) -> bool:
        """Whether a value in a call's graph is computed from the argument."""
        return any(_comes_from(name, source, prologue, results) for source in _sources(call, node))

    return [call.name for call in calls
            if not all(reads(call, segments) for segments in _segments(templates[call.template].forward_graph()))]


def calls_across_sequences(name: str, calls: Sequence[Call], templates: Mapping[str, Template]) -> list[str]:
    """The calls in which tokens of a row read each other without knowing from the batch argument `name` where its sequences
    begin: by a recurrence or a convolution, or in attention. A call may know it by a mask of pairs of tokens, or by numbers or
    flags of tokens, such as the sequence that each belongs to."""
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
    """Whether an input of a call is the batch argument, or is computed from it in the prologue."""
    return source.name == name if source.kind == "batch" else source.kind == "shared" and any(
        _comes_from(name, each, prologue, results) for each in _sources(prologue, results[source.index]))


def _segments(graph: fx.Graph) -> list[object]:
    """The segments argument of each attention in a graph: the sequence of each token. None: it has no segments."""
    calls = graph.find_nodes(op="call_function", target=torch.ops.megacompile.attention.default)
    return [call.args[_SEGMENTS] if len(call.args) > _SEGMENTS else None for call in calls]


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
