"""Moves totals over tokens into the layers, where a model computes them after its last layer from values of all layers.

An auxiliary loss of routers adds up, layer by layer, what each router gave to each expert. The model does this after its last
layer, so every call would have to pass on the router logits of all earlier layers. If a total needs no values of calls after a
certain one, that call computes it and passes on the total, which is a few numbers.
"""
from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, fx

from megacompile.frontend.templates.template import Source
from megacompile.frontend.tracing.model_graph import called_name

#: Ops that change how the nodes after them are computed: nothing may be moved out from there.
MODES = ("_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode")
_FROM_ANYWHERE = ("batch", "size")


def made_in_layers(epilogue: Sequence[fx.Node], made_by: Mapping[fx.Node, int], sources: Mapping[fx.Node, Source],
                   results: Collection[fx.Node], layers: int) -> dict[fx.Node, int]:
    """The nodes of the epilogue, in program order, that earlier calls are to compute, and the call that computes each (0 is
    the prologue). `made_by`: the call that makes each value as the model is written; the epilogue is call `layers` + 1.

    The last layer computes the same totals as the one before it, so that one template serves both; the rest stays.
    """
    if any(getattr(node.target, "__name__", "") in MODES for node in epilogue):
        return {}
    possible = _possible(epilogue, made_by, sources, results, layers)
    early = _needed_by_totals({n: s for n, s in possible.items() if s < layers}, range(1, layers))
    pattern = [node for node, stage in early.items() if stage == layers - 1]
    last = [n for n, stage in _needed_by_totals(possible, (layers,)).items() if stage == layers]
    same = [b for a, b in zip(pattern, last, strict=False) if (a.op, a.target) == (b.op, b.target)]
    if pattern and same == last[:len(pattern)]:
        early |= _with_inputs(same, possible)
    for node in early:  # a constant is made where it is read: no call may change what another made
        readers = {early[user] for user in node.users if user in early}
        if not node.all_input_nodes and len(readers) == 1:
            early[node] = readers.pop()
    return {node: early[node] for node in epilogue if node in early}


def _possible(epilogue: Sequence[fx.Node], made_by: Mapping[fx.Node, int], sources: Mapping[fx.Node, Source],
              results: Collection[fx.Node], layers: int) -> dict[fx.Node, int]:
    """The nodes that read no weight and nothing that must stay, and the call after which everything that they read exists."""
    stages: dict[fx.Node, int] = {}

    def stage(node: fx.Node) -> int | None:
        if node in sources:
            return 0 if sources[node].kind in _FROM_ANYWHERE else None
        made = made_by.get(node)
        if made is None:  # what goes along with its readers: numbers, and views of weights
            return None if isinstance(node.meta.get("example_value"), Tensor) else 0
        return stages.get(node) if made > layers else made

    for node in epilogue:
        read = [stage(each) for each in node.all_input_nodes]
        if node not in results and None not in read and not _is_changed(node) and not _changes_another(node):
            stages[node] = max((each for each in read if each is not None), default=0)
    return stages


def writes(node: fx.Node) -> bool:
    """Whether a node changes its first input in place."""
    name = called_name(node)
    in_place = name.startswith("i") and hasattr(operator, name[1:]) and getattr(operator, name, None) is node.target
    return in_place or name == "setitem" or (name.endswith("_") and not name.endswith("__"))


def _is_changed(node: fx.Node) -> bool:
    """Whether a value is changed in place and has other readers: all of them would have to move along."""
    return len(node.users) > 1 and any(writes(user) and user.args[0] is node for user in node.users)


def _changes_another(node: fx.Node) -> bool:
    """Whether a node changes a value in place that may come from another call: any value that is not a constant."""
    return writes(node) and bool(node.all_input_nodes[0].all_input_nodes)


def _needed_by_totals(possible: Mapping[fx.Node, int], stages: Collection[int]) -> dict[fx.Node, int]:
    """The totals of these stages with everything that they are made of."""
    return _with_inputs([n for n, stage in possible.items() if stage in stages and _is_total(n)], possible)


def _with_inputs(nodes: Collection[fx.Node], possible: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    needed, pending = set(nodes), list(nodes)
    while pending:
        found = [n for n in pending.pop().all_input_nodes if n in possible and n not in needed]
        needed.update(found)
        pending += found
    return {node: stage for node, stage in possible.items() if node in needed}


def _is_total(node: fx.Node) -> bool:
    """Whether a value's size is the same for all batches."""
    value = node.meta.get("example_value")
    return isinstance(value, Tensor) and not any(isinstance(size, torch.SymInt) for size in value.shape)
