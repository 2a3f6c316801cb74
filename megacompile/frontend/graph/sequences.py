"""Sequences divided among ranks: each rank has some tokens of every sequence, and attention some heads of all tokens.

    attention(q, k, v)   ->   to_tokens(attention(to_heads(q), to_heads(k), to_heads(v)))

Everything else in a layer treats each token alone, which is checked. Where the heads do not divide evenly, zeros are added up
to the next multiple, so that the busiest rank has as many heads as it must have in any case. Key and value heads that are fewer
than the ranks are repeated for their query heads.

Rows of several documents have a batch argument more: `DOCUMENTS` numbers the documents of the whole row.
"""
from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from megacompile.compat.core import LazyGraphModule
from megacompile.errors import UnsupportedError
from megacompile.frontend.graph.split import Section
from megacompile.frontend.ops import exchanges  # noqa: F401  # registers the ops
from megacompile.frontend.ops.mixer_ops import mixer_of, op_name
from megacompile.frontend.templates.across_rows import mixing_of_tokens
from megacompile.frontend.templates.template import Call, Source, Template
from megacompile.frontend.tracing.layer_calls import source_line
from megacompile.ir.plan import PLAIN, CaptureKey
from megacompile.ir.tokenwise import Layout, has_tokens, packet, tensors

ops = torch.ops.megacompile
#: The batch argument with the number of each token's document in its row, int32 [B, T]; and the one with the token that each
#: token predicts, which transformers' losses take in place of labels that they would shift.
DOCUMENTS, SHIFTED = "documents", "shift_labels"
#: Sources of values that a part of a row cannot have -> what a model does with them.
_OF_ALL_TOKENS = {"random": "draws dropout by the positions of tokens in a batch (set dropout to 0)",
                  "share": "adds a loss of its own to that of tokens (routers: router_aux_loss_coef=0)",
                  "total": "computes a value from all rows of a batch"}
#: Ops that number the tokens that a rank has, which are not the first ones of their sequence.
_COUNTING = ("arange", "iota", "cumsum")
#: Ops that choose values of their first argument by number.
_CHOOSING = ("index", "gather", "index_select", "index_put", "scatter", "scatter_add", "scatter_reduce", "index_add")
#: Ops whose results have all tokens.
_TO_ALL_TOKENS = ("megacompile.to_heads", "megacompile.all_tokens")


def divided_key(ranks: int, documents: bool = False, key: CaptureKey = PLAIN) -> CaptureKey:
    """The key of batches whose sequences are divided among so many ranks; `key`: of the same batches with whole sequences."""
    return dataclasses.replace(key, further=("position_ids", SHIFTED), traced_length=0, sequence_ranks=ranks,
                               documents=documents)


def divide_attention(section: Section, key: CaptureKey, fakes: Any) -> Section:
    """The section with exchanges around each attention, for sequences that `key.sequence_ranks` have together. Raises
    `UnsupportedError` for other mixers, and for attention under a mask."""
    mixers = [node for node in section.graph.graph.nodes if node.op == "call_function" and mixer_of(node.target)]
    for node in mixers:
        masked = any(argument is not None for argument in node.args[7:8])
        if op_name(node.target) != "megacompile.attention" or masked:
            what = "a mask of its own" if masked else op_name(node.target)
            raise UnsupportedError(f"{section.name} mixes tokens by {what}, and a sequence is divided among ranks only for "
                                   f"causal attention: leave the mesh's dimension sequence out{source_line(node)}")
    if not mixers:
        return section
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    sources, documents = list(section.sources), None
    for node in section.graph.graph.nodes:
        if node.op != "placeholder" and key.documents and documents is None:
            documents = _documents(graph, mixers[0], fakes)
            sources.append(Source("batch", DOCUMENTS))
        if node in mixers:
            copies[node] = _divided(graph, node, copies, key.sequence_ranks, documents, fakes)
        elif node.target is operator.getitem and node.args[0] in mixers:
            # The sums of scores stay with the heads: no model reads them.
            assert node.args[1] == 0 or not node.users, f"{section.name} reads the sums of its scores"
            copies[node] = copies[node.args[0]]  # type: ignore[index]
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    divided = LazyGraphModule(section.graph, graph)
    divided.meta.update(section.graph.meta)
    return dataclasses.replace(section, graph=divided, sources=sources)


def _documents(graph: fx.Graph, attention: fx.Node, fakes: Any) -> fx.Node:
    """A placeholder for the numbers of documents."""
    batch, _, length, _ = attention.args[0].meta["example_value"].shape  # type: ignore[union-attr]
    node = graph.placeholder(DOCUMENTS)
    with fakes:
        node.meta["example_value"] = torch.zeros(batch, length, dtype=torch.int32)
    return node


def _divided(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node], ranks: int, documents: fx.Node | None,
             fakes: Any) -> fx.Node:
    """Attention over all tokens for this rank's heads. Returns its result for this rank's tokens."""
    def call(function: Any, *arguments: Any) -> fx.Node:
        made = graph.call_function(function, arguments)
        values = fx.map_arg(arguments, lambda argument: argument.meta["example_value"])
        with fakes:
            made.meta["example_value"] = function(*values)
        return made

    def exchanged(value: fx.Node, repeats: int) -> fx.Node:
        if repeats > 1:
            value = call(torch.Tensor.expand, call(torch.unsqueeze, value, 2), -1, -1, repeats, -1, -1)
            value = call(torch.flatten, value, 1, 2)
        return call(ops.to_heads.default, value, ranks)

    given: Any = fx.map_arg(node.args, copies.__getitem__)
    query, key, value, *options = given
    heads, groups = (int(each.meta["example_value"].shape[1]) for each in (query, key))
    if heads % ranks == 0 and groups % ranks == 0:
        repeats = 1
    elif heads % ranks == 0 and ranks % groups == 0:
        repeats = ranks // groups
    else:  # a rank's heads may be of several groups
        repeats = heads // groups
    arguments: list[Any] = [exchanged(query, 1), exchanged(key, repeats), exchanged(value, repeats), *options]
    if documents is not None:
        arguments[6:8] = ["packed", call(ops.all_tokens.default, documents, ranks)]
    if any(sinks is not None for sinks in arguments[8:]):
        arguments[8] = call(ops.own_heads.default, arguments[8], ranks)
    found = call(ops.attention.default, *arguments)
    return call(ops.to_tokens.default, call(operator.getitem, found, 0), ranks, heads)


def check_divided(key: CaptureKey, templates: Mapping[str, Template], calls: Sequence[Call], has_loss: bool,
                  name: str) -> None:
    """Raises `UnsupportedError` if a call computes with several tokens of a row other than by exchanges around attention, or
    numbers the tokens that it has, or if the loss does not take the targets of tokens."""
    if key.sequence_ranks == 1:
        return
    kinds = {source.kind for call in calls for source in call.sources}
    if what := next((what for kind, what in _OF_ALL_TOKENS.items() if kind in kinds), None):
        raise UnsupportedError(f"{name} {what}, which needs all tokens of a row in one place: leave the mesh's dimension "
                               "sequence out")
    for template, call in {call.template: call for call in reversed(calls)}.items():
        if found := why_not_divided(templates[template]):
            raise UnsupportedError(f"{call.name} computes with several tokens of a row by {found}, and a rank has only some of "
                                   "them: leave the mesh's dimension sequence out")
    if has_loss and SHIFTED not in _read_by(templates[calls[-1].template], calls[-1]):
        raise UnsupportedError(f"the loss of {name} shifts its labels by itself, and a token's target may be on another rank: "
                               f"take {SHIFTED} in its forward, as losses of transformers do, or leave the mesh's dimension "
                               "sequence out")


def _read_by(template: Template, call: Call) -> set[str]:
    """The batch arguments that a call reads."""
    placeholders = template.forward_graph().find_nodes(op="placeholder")
    return {source.name for node, source in zip(placeholders, call.sources, strict=True)
            if source.kind == "batch" and node.users}


def why_not_divided(template: Template) -> str:
    """The name of an op that needs other tokens than those that a rank has, or gets them without an exchange; "" if none is
    known."""
    layout = Layout(template.renaming)
    counted: dict[fx.Node, str] = {}  # numbers of tokens, from the first one that a rank has -> the op that counts them
    for node in template.forward_graph().nodes:
        name = str(packet(node)).rpartition(".")[2]
        if name in _COUNTING and has_tokens(node, layout):
            counted[node] = name
        elif node.op == "call_function" and (read := [each for each in node.all_input_nodes if each in counted]):
            if name in _CHOOSING and node.args[0] not in counted and has_tokens(node.args[0], layout):
                continue  # tokens in another order: experts take theirs so
            if any(value.is_floating_point() for value in tensors(node)):
                return counted[read[0]]
            counted[node] = counted[read[0]]
        if op_name(node.target) == "megacompile.attention" and not _is_exchanged(node):
            return "attention without an exchange"
    return mixing_of_tokens(template)


def _is_exchanged(attention: fx.Node) -> bool:
    """True if an attention gets all tokens, and returns those of this rank."""
    operands = [argument for argument in (*attention.args[:3], *attention.args[7:8]) if isinstance(argument, fx.Node)]
    results = [reader for user in attention.users if user.args[1] == 0 for reader in user.users]
    return (all(op_name(operand.target) in _TO_ALL_TOKENS for operand in operands)
            and all(op_name(reader.target) == "megacompile.to_tokens" for reader in results))
