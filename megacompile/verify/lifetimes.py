"""Rule `placed`: in program order, each slot holds one value at a time, and each value is released or leased."""
from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from megacompile.ir.listing import describe
from megacompile.ir.program import SLOT_KINDS, Program, argument, find, nodes, op_of, operands, place_of, slot_family, stays
from megacompile.verify.fault import Fault

#: The call and the micro-batch of a checkpoint in host memory.
Stashed = tuple[str, int]
_HEAP = ("activation", "gradient", "accumulators")  # values with memory of their own


def placed(program: Program) -> Iterator[Fault]:
    """Slots are declared, large enough and of the right kind. No slot is overwritten while its value is alive, from the
    value's write to its release. Every value is released or leased before its section ends. A tile's weights, state and
    gradients that stay on the device keep the same slots in every section."""
    for slot in program.slots:
        if slot_family(slot) not in SLOT_KINDS:
            yield Fault(f"slot {slot} is of an unknown family", f"begin its name with one of {', '.join(SLOT_KINDS)}")
    resident: dict[str, fx.Node] = {}
    stay: dict[tuple[str, str], fx.Node] = {}  # (kind of value, tile) -> the first node that uses its slot
    awaited = {stashed_by(node) for graph in program.sections.values() for node in find(graph, "stashed")}
    for name, graph in program.sections.items():
        for node in nodes(graph):
            if "into" in op_of(node).parameters:
                yield from _fits(program, node)
        yield from _lives(name, graph, awaited)
        for node in nodes(graph):
            place = argument(node, "into")
            if place is not None and stays(place):
                other = resident.setdefault(place, node)
                if argument(other, "tile") != argument(node, "tile"):
                    yield Fault(f"slot {place} is resident for {argument(other, 'tile')}, but {describe(node)} uses it",
                                "give each resident tile a slot of its own", node, other, hazard=True)
                first = stay.setdefault((str(op_of(node).result), argument(node, "tile")), node)
                if argument(first, "into") != place:
                    yield Fault(f"{describe(node)} uses slot {place}, but its tile stays in slot "
                                f"{argument(first, 'into')}", "use one slot for it in every section", node, first, hazard=True)


def kept_slots(program: Program) -> dict[str, str]:
    """Slot -> tile, for the slots whose contents outlive sections."""
    return {argument(node, "into"): argument(node, "tile") for graph in program.sections.values() for node in nodes(graph)
            if argument(node, "into") is not None and stays(argument(node, "into"))}


def _fits(program: Program, node: fx.Node) -> Iterator[Fault]:
    op, place = op_of(node), argument(node, "into")
    if place is None:
        if op.home is None:
            yield Fault(f"{describe(node)} has no place", "give it a slot (into=...)", node)
        return
    kinds = SLOT_KINDS.get(slot_family(place), ())
    if place not in program.slots or op.result not in kinds:
        why = f"of kind {' or '.join(kinds)}" if place in program.slots else "not declared"
        yield Fault(f"{describe(node)} writes {op.result} to slot {place}, which is {why}",
                    f"give it a declared slot for {op.result}", node)
        return
    needed = program.value_bytes(node)
    if program.slots[place].bytes < needed:
        yield Fault(f"{describe(node)} writes {needed} bytes to slot {place} of {program.slots[place].bytes} bytes",
                    "make the slot larger", node)
    if op.name == "resident" and not stays(place):
        yield Fault(f"{describe(node)} cannot use slot {place}", "use R slots for resident tiles, and only those", node)


def stashed_by(node: fx.Node) -> Stashed:
    """The checkpoint that a `stash` or `stashed` node stashes or takes."""
    return argument(node, "call"), argument(node, "mb")


def _waits(node: fx.Node, awaited: set[Stashed]) -> bool:
    """Whether a node stashes what a later section takes."""
    return op_of(node).name == "stash" and stashed_by(node) in awaited


def _lives(name: str, graph: fx.Graph, awaited: set[Stashed]) -> Iterator[Fault]:
    """`awaited`: what later sections take from host memory."""
    alive: dict[str, fx.Node] = {}  # slot -> the value in it
    ended: set[fx.Node] = set()
    leased: dict[fx.Node, fx.Node] = {}
    for node in nodes(graph):
        op, place = op_of(node), argument(node, "into")
        if op.name == "release":
            (value,) = operands(node, "value")
            if stays(place_of(value)):
                yield Fault(f"{value.name} is released although {place_of(value)} is resident: later sections read it",
                            "drop the release", node, value, hazard=True)
            if _waits(value, awaited):
                yield Fault(f"{value.name} is released although a later section fetches it", "drop the release", node, value,
                            hazard=True)
            if value in leased:
                yield Fault(f"{value.name} is released although it is leased to a later section", "drop the release",
                            node, leased[value], hazard=True)
            ended.add(value)
            if alive.get(place_of(value)) is value:
                del alive[place_of(value)]
        elif op.name == "lease":
            leased[operands(node, "value")[0]] = node
        elif place is not None:
            if place in alive and not stays(place):
                yield Fault(f"slot {place} is overwritten by {describe(node)} while {alive[place].name} "
                            f"({describe(alive[place])}) is alive in it", "release that value first, or use another",
                            node, alive[place], hazard=True,
                            order=f"write of {place} by {describe(node)} is not after the release of {alive[place].name}")
            alive[place] = node
    for node in nodes(graph):
        place = argument(node, "into")
        memory = op_of(node).result in _HEAP or (place is not None and not stays(place))
        kept = node in leased or _waits(node, awaited)
        if memory and node not in ended and not kept:
            yield Fault(f"{node.name} ({describe(node)}) is neither released nor leased in {name}: its memory stays "
                        "taken", "release it after its last use", node)
