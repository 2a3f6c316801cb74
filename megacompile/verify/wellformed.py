"""Rule `well_formed`: each node is valid by itself and with its operands."""
from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import fx

from megacompile.ir.listing import describe
from megacompile.ir.program import OPS, Access, CallSpec, Kept, Lane, Op, Program, argument, lane_of, nodes, op_of, operands
from megacompile.ir.text import KINDS
from megacompile.verify.fault import Fault

#: Parameter -> the kinds of values that it takes. A `leased` value may be of any kind; other parameters take any value.
_TAKES = {
    "weights": {"weights"}, "inputs": {"activation", "checkpoint", "stashed"}, "gradient": {"gradient"},
    "accumulators": {"accumulators"},
    "saved": {"activation"},
    "reduced": {"reduced", "gradients"}, "resident": {"weights"},
    "state": {"state"}, "slab": {"slab"}, "stashed": {"stashed"}, "staging": {"staging", "packed_shard"}, "shard": {"shard"},
    "clip": {"clip"}, "moments": {"moments"},
    "event": {"event"}, "values": {"activation", "gradient"}}
_SEVERAL = (tuple, list)
_TYPES: dict[str, type | tuple[type, ...]] = {
    "text": str, "number": int, "flag": bool, "value": fx.Node, "value or values": (fx.Node, *_SEVERAL),
    "values": _SEVERAL, "texts": _SEVERAL}
#: Ops whose values have residuals.
_SAVING = ("forward_saving", "leased")
#: A value that is passed as one of these, and the node that takes it, are of one tile.
_OF_ONE_TILE = frozenset({"reduced", "slab", "staging", "shard", "resident", "state", "moments"})


def well_formed(program: Program) -> Iterator[Fault]:
    """Each node is an op of the language, with arguments and values of the kinds that the op takes. Names are declared. Nothing
    is used before it is defined or after its release, and nothing is released twice."""
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
    """Checks the form of a node. These faults show no excerpt, which only nodes of valid form have."""
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
    """`made`: the op that makes the value."""
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
    """Tiles, calls, templates, lanes, accesses and micro-batches exist."""
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
