"""Rule `well_formed`: each node is valid by itself and with its operands."""
from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import fx

from megacompile.ir.ops import UPDATE_OPS
from megacompile.ir.printing import describe
from megacompile.ir.program import (
    OPS,
    Access,
    CallSpec,
    Kept,
    Lane,
    Op,
    Program,
    argument,
    find,
    lane_of,
    nodes,
    op_of,
    operands,
)
from megacompile.ir.text import KINDS
from megacompile.verify.fault import Fault
from megacompile.verify.updates import summed_tiles

#: Parameter -> the kinds of values that it takes. A `leased` value may be of any kind; other parameters take any value.
_TAKES = {
    "weights": {"weights"}, "inputs": {"activation", "checkpoint", "stashed"}, "gradient": {"gradient"},
    "accumulators": {"accumulators"},
    "saved": {"activation"},
    "reduced": {"reduced", "gradients"}, "resident": {"weights"},
    "state": {"state"}, "slab": {"slab"}, "stashed": {"stashed"}, "staging": {"staging", "packed_shard"}, "shard": {"shard"},
    "clip": {"clip"}, "held": {"held"}, "current": {"weights"}, "moments": {"moments"}, "router": {"activation"},
    "event": {"event"}, "values": {"activation", "gradient"}}
_SEVERAL = (tuple, list)
_TYPES: dict[str, type | tuple[type, ...]] = {
    "text": str, "number": int, "flag": bool, "value": fx.Node, "value or values": (fx.Node, *_SEVERAL),
    "values": _SEVERAL, "texts": _SEVERAL}
#: Ops whose values have residuals.
_SAVING = ("forward_saving", "leased")
#: A value that is passed as one of these, and the node that takes it, are of one tile.
_OF_ONE_TILE = frozenset({"reduced", "slab", "staging", "shard", "resident", "state", "moments", "held", "current"})


def well_formed(program: Program) -> Iterator[Fault]:
    """Each node is an op of the language, with arguments and values of the kinds that the op takes. Names are declared.
    Nothing is used before it is defined or after its release, and nothing is released twice."""
    yield from _declarations(program)
    calls = {call.name: call for call in program.calls}
    known: dict[str, Collection[Any]] = {"tile": program.tiles, "lane": tuple(Lane), "access": tuple(Access),
                                         "mb": range(len(program.micro_batches)), "call": calls}
    for name, graph in program.sections.items():
        for node in graph.nodes:
            yield from _words(name, node)
        defined: dict[fx.Node, int] = {}
        released: dict[fx.Node, fx.Node] = {}
        for node in nodes(graph):
            yield from _order(node, defined, released)
            yield from _operands(node)
            yield from _names(known, calls, node)
            defined[node] = len(defined)


def _declarations(program: Program) -> Iterator[Fault]:
    for call in program.calls:
        for tile in call.tiles:
            if tile not in program.tiles:
                yield Fault(f"call {call.name} reads tile {tile}, which is not declared", "declare the tile")
        for variant in call.weightless:
            if variant not in OPS:
                yield Fault(f"call {call.name} is weightless in {variant}, which is not an op", "name an op")
    if len({call.name for call in program.calls}) < len(program.calls):
        yield Fault("two calls have the same name", "give each call a name of its own")


def _words(section: str, node: fx.Node) -> Iterator[Fault]:
    """Checks the form of a node. These faults show no excerpt, since an excerpt needs nodes of valid form."""
    where = f"section {section}, node {node.name}"
    if node.op != "call_function" or not isinstance(node.target, Op):
        yield Fault(f"{where}: {node.op} of {node.target} is not an op of a schedule", "use the ops of `program.OPS`")
        return
    op = node.target
    unknown = [name for name in node.kwargs if name not in op.parameters]
    missing = [name for name in op.required if argument(node, name) is None]
    if node.args or unknown or missing:
        yield Fault(f"{where}: {op.name} has arguments that it does not take ({[*node.args, *unknown]}) or lacks some "
                    f"({missing})", f"give it {', '.join(op.parameters)}, by name")
    for name, value in node.kwargs.items():
        if value is None or name in unknown:
            continue
        kind = KINDS[name]
        item_type = str if kind == "texts" else fx.Node
        if not isinstance(value, _TYPES[kind]) or (kind == "number" and isinstance(value, bool)) or (
                isinstance(value, _SEVERAL) and not all(isinstance(item, item_type) for item in value)):
            yield Fault(f"{where}: argument {name} of {op.name} is {value!r}, not a {kind}", "give it another argument")


def _order(node: fx.Node, defined: dict[fx.Node, int], released: dict[fx.Node, fx.Node]) -> Iterator[Fault]:
    for value in node.all_input_nodes:
        if value not in defined:
            if op_of(node).name == "wait" and value.graph is node.graph:
                yield Fault(f"{describe(node)} comes before its event is recorded: the lane would never go on",
                            "record the event above the wait", node, value, hazard=True)
            yield Fault(f"{describe(node)} uses {value.name} before it is defined", "define the value above its use",
                        node, value if value.graph is node.graph else None)
        if value in released and op_of(node).name != "record":
            again = "releases" if op_of(node).name == "release" else "uses"
            yield Fault(f"{describe(node)} {again} {value.name} after its release",
                        "release it once, after its last use", node, released[value], hazard=True)
    if op_of(node).name == "release":
        released[operands(node, "value")[0]] = node


def _operands(node: fx.Node) -> Iterator[Fault]:
    op = op_of(node)
    for name in node.kwargs:
        for value in operands(node, name):
            yield from _operand(node, name, value, op_of(value))
    if op.name == "record" and lane_of(operands(node, "node")[0]) is None:
        yield Fault(f"{describe(node)} is of a node that no lane executes", "record a node of the lane", node)
    if op.name in ("lease", "leased"):
        what = Kept.of(operands(node, "value")[0] if op.name == "lease" else node)
        if (what.tile is None) == (what.call is None) or (what.mb is None) != (what.call is None):
            yield Fault(f"{describe(node)} is neither a call's value for one micro-batch nor one tile's accumulators",
                        "name a call and a micro-batch, or a tile", node)
    if op.name == "leave" and op_of(operands(node, "event")[0]).name != "record":
        yield Fault(f"{describe(node)} passes an event of an earlier section to later sections",
                    "record an event in this section", node)


def _operand(node: fx.Node, name: str, value: fx.Node, made: Op) -> Iterator[Fault]:
    """Checks an operand. `made`: the op that makes the value."""
    takes = _TAKES.get(name)
    if takes is not None and made.result not in takes and made.name != "leased":
        yield Fault(f"{describe(node)} takes {value.name} as {name}, but {made.name} makes {made.result or 'no value'}",
                    f"give it one of: {', '.join(sorted(takes))}", node, value)
    if name in ("value", "saved") and (
            made.result in (None, "event") or (name == "saved" and made.name not in _SAVING)):
        yield Fault(f"{describe(node)} takes {value.name}, but {made.name} keeps nothing in memory for it",
                    "give it a value" if name == "value" else "give it a forward_saving", node, value)
    if name in _OF_ONE_TILE and argument(value, "tile") != argument(node, "tile"):
        yield Fault(f"{describe(node)} takes {value.name}, which is of tile {argument(value, 'tile')}",
                    "give it the value of its own tile", node, value)


def _names(known: Mapping[str, Collection[Any]], calls: Mapping[str, CallSpec], node: fx.Node) -> Iterator[Fault]:
    """Checks that tiles, calls, templates, lanes, accesses and micro-batches exist."""
    for name, value in node.kwargs.items():
        if name in known and value is not None and value not in known[name]:
            yield Fault(f"{describe(node)} names {name} {value}, which the program does not have",
                        f"name one of: {', '.join(map(str, list(known[name])[:8]))}", node)
    for tile in (*(argument(node, "tiles") or ()), *(argument(node, "on_disk") or ())):
        if tile not in known["tile"]:
            yield Fault(f"{describe(node)} names tile {tile}, which the program does not have", "declare it", node)
    if "template" in op_of(node).parameters and calls[argument(node, "call")].template != argument(node, "template"):
        call = calls[argument(node, "call")]
        yield Fault(f"{describe(node)} runs template {argument(node, 'template')}, but {call.name} is of template "
                    f"{call.template}", "run the template of the call", node)


# --------------------
# Rules about whole sections: where each op may stand, what the caller gets, and that gradients and weight versions are right.
#
# The built-in passes always keep them; a hand-edited program or a user's pass may not.
_BACKWARDS = ("backward", "backward_accumulate", "train_step")
_UPDATES = ("update", "backward", "train_step")
#: Op -> the sections in which it may stand. Other ops may stand in any section.
_SECTIONS: dict[str, tuple[str, ...]] = {
    "loss": ("forward", "train_step"), **dict.fromkeys(("evaluate", "prefetch_routed"), ("evaluate",)),
    "outputs": ("forward", "evaluate"),
    "lease": ("forward",), **dict.fromkeys(("leased", "scale", "output_gradient"), ("backward", "backward_accumulate")),
    **dict.fromkeys(("backward", "recompute_backward", "reduce", "offload", "accumulate"), _BACKWARDS),
    "stash": ("forward", "train_step"), "fetch": _BACKWARDS, "stashed": ("backward", "backward_accumulate"),
    **dict.fromkeys(("offload_norms", "add_to_sum", "norms_of_sum"), ("train_step",)),
    "clip": ("update",), "update_from_sum": ("update", "train_step"),
    **dict.fromkeys(("update", "update_on_device", "read_state", "write_state"), _UPDATES),
    **dict.fromkeys(("update_weights", "update_moments", "momentum", "gather_momentum", "update_visiting", "held",
                     "update_held", "return_weights", "return_state"), ("update",)),
    **dict.fromkeys(("hold", "fetch_held"), ("train_step",)),
    "offload_weights": (*_UPDATES, "rescue"), "fetch_gradients": ("backward_accumulate", "refresh"),
    "fetch_state": ("load",), "store_state": ("store",),
    **dict.fromkeys(("reduce_scatter", "all_reduce", "share_norms"), _BACKWARDS),
    "share_host_norms": ("backward_accumulate", "train_step"),
    **dict.fromkeys(("pack_shard", "prefetch_shard", "gather"), ("forward", "update", *_BACKWARDS, "evaluate", "load")),
    **dict.fromkeys(("gather_resident", "announce"), _UPDATES),
    **dict.fromkeys(("total_loss", "share_loss"), ("forward", "train_step"))}
_RESULTS = ("loss", "evaluate", "outputs")
#: Ops that copy weights from the host, the whole tile or a shard.
_FETCHES = ("pack", "prefetch", "prefetch_routed", "pack_shard", "prefetch_shard")
_GRADIENTS = ("gradient", "accumulators")


def belongs(program: Program) -> Iterator[Fault]:
    """Each op is in a section where it has a meaning."""
    for name, graph in program.sections.items():
        for node in nodes(graph):
            allowed = _SECTIONS.get(op_of(node).name, (name,))
            if name not in allowed:
                yield Fault(f"{describe(node)} is in {name}", f"{op_of(node).name} belongs in {' or '.join(allowed)}", node)


def returned(program: Program) -> Iterator[Fault]:
    """The caller gets the loss or the outputs of every micro-batch, once and in order, under the name of the op. With outputs
    it may also get the hidden states of every call but the last two."""
    for name, graph in program.sections.items():
        made = sorted(find(graph, *_RESULTS), key=lambda node: int(argument(node, "mb")))
        given: list[fx.Node] = []
        hidden: list[fx.Node] = []
        for result in find(graph, "result"):
            for value in _parts(result):
                (hidden if op_of(value).name == "forward" else given).append(value)
                if argument(result, "key") != op_of(value).name:
                    yield Fault(f"{describe(result)} hands over {value.name}, which is of {op_of(value).name}",
                                f'hand it over as "{op_of(value).name}"', result, value)
        lost = next((node for node in made if node not in given), None)
        if lost is not None:
            yield Fault(f"{describe(lost)} is never handed to the caller in {name}", "name it in a result", lost)
        if given != made:
            yield Fault(f"{name} hands over {', '.join(n.name for n in given)}, not {', '.join(n.name for n in made)}",
                        "hand over each micro-batch's value once, in order", next(find(graph, "result"), None))
        forwards = {(argument(n, "call"), argument(n, "mb")): n for n in find(graph, "forward")}
        wanted = [forwards.get((call.name, mb)) for call in program.calls[:-2] for mb in range(len(program.micro_batches))]
        if hidden and (hidden != wanted or not any(find(graph, "outputs"))):
            yield Fault(f"{name} hands over hidden states, and not those of every call but the last two",
                        "hand over each call's, of each micro-batch, in order, or none", next(find(graph, "result"), None))


def _parts(result: fx.Node) -> Iterator[fx.Node]:
    """The values that a result returns. For a total loss, these are its parts."""
    for value in operands(result, "values"):
        yield from operands(value, "values") if op_of(value).name == "total_loss" else (value,)


def added_up(program: Program) -> Iterator[Fault]:
    """Each section adds up a tile's gradients in one value, or in several that the host adds up (`summed`). The backward
    scales the gradients that the forward kept by the gradient of the caller's loss, and nothing else."""
    kept = {}
    if "forward" in program.sections:
        kept = {Kept.of(value): value for lease in find(program.section("forward"), "lease")
                for value in operands(lease, "value")}
    for name, graph in program.sections.items():
        sums: dict[str, fx.Node] = {}
        on_host = summed_tiles(program, name)
        for node in nodes(graph):
            for value in operands(node, "accumulators"):
                made = kept.get(Kept.of(value), value) if op_of(value).name == "leased" else value
                other = sums.setdefault(str(argument(made, "tile")), value)
                if other is not value and argument(made, "tile") not in on_host:
                    yield Fault(f"{describe(node)} uses {value.name}, but {other.name} holds gradients of the same tile: a "
                                "part would be lost", f"use {other.name}", node, other)
                if name == "forward" and value not in kept.values():
                    yield Fault(f"{describe(node)} adds to {value.name}, which is not kept for the backward", "lease it",
                                node, value)
        for node in find(graph, "scale"):
            (value,) = operands(node, "value")
            if op_of(value).name != "leased" or op_of(kept.get(Kept.of(value), value)).result not in _GRADIENTS:
                yield Fault(f"{describe(node)} scales a value, not a gradient that the forward kept", "drop it", node, value)


def one_version(program: Program) -> Iterator[Fault]:
    """Nothing runs on weights that were fetched after a tile's update in the same section, and each update comes after the
    tile's gradients."""
    for name, graph in program.sections.items():
        home: dict[str, fx.Node] = {}
        updated: dict[str, fx.Node] = {}
        stale: dict[fx.Node, fx.Node] = {}  # weights -> the update before them
        for node in nodes(graph):
            tile, op = argument(node, "tile"), op_of(node).name
            if op in UPDATE_OPS:
                updated[tile] = node
                if op != "update_on_device" and name != "update" and tile not in home:
                    yield Fault(f"{describe(node)} comes before the tile's gradients are in host memory in {name}",
                                "update it after its offload (or accumulate)", node)
            elif op in ("accumulate", "offload", "add_to_sum"):
                home[tile] = node
                if tile in updated:
                    yield Fault(f"{describe(node)} brings gradients of a tile that {describe(updated[tile])} has updated",
                                "update it after its gradients are offloaded", node, updated[tile])
            elif op in _FETCHES and tile in updated:
                stale[node] = updated[tile]
            elif op == "gather" and (shard := operands(node, "shard")[0]) in stale:
                stale[node] = stale[shard]
            for value in operands(node, "weights"):
                newer = stale.get(value) or (updated.get(str(argument(value, "tile"))) if op_of(value).name == "resident"
                                             else None)
                if newer is not None:
                    yield Fault(f"{describe(node)} would run on weights that {describe(newer)} has updated",
                                "fetch and use them before the update", node, newer)
