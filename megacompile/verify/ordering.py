"""The order between lanes: vector clocks over the nodes of a section.

Each lane runs its nodes in program order; lanes run concurrently. `e = record(n)` runs on the lane of n and fires when
everything before it on that lane is done; `wait(lane, e)` holds that lane back until then. Nothing else orders lanes.
A *clock* says, for one lane at one moment, how many nodes of each lane are certainly done.

What ran before the section is unknown, so the worst is assumed: every lane that ever accesses places of a kind
(`lanes_that`) may have been the last to access any of them. Lanes run on across sections, so a lane is ordered after its
own past. It is ordered after another lane's past only by a wait on the `enter` event of that access, or on any event that
the other lane records in this section. In return, each section passes on with `leave` events that cover its own last
accesses (rule `handed_on` in `verifier.py`). A section that is ordered after the worst past, and passes on its accesses, is
ordered with every other such section, in any sequence and of any shape. So proving each section proves every pair of
sections, of this program or another.

State: a clock for each lane, the clock at which each node is done, the last accesses to each place.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from megacompile.ir.printing import describe
from megacompile.ir.program import (
    SLOT_KINDS,
    Access,
    Lane,
    Program,
    accesses,
    argument,
    find,
    lane_of,
    lanes_that,
    nodes,
    op_of,
    operands,
    place_kind,
    place_of,
    slot_family,
    stays,
)
from megacompile.verify.fault import Fault

# --------------------
# Rule `placed`: in program order, each slot holds one value at a time, and each value is released or leased.
#: The call and the micro-batch of a checkpoint in host memory.
Stashed = tuple[str, int]
_HEAP = ("activation", "gradient", "accumulators")  # values with memory of their own


def placed(program: Program) -> Iterator[Fault]:
    """Slots are declared, large enough and of the right kind. No slot is overwritten while its value is alive. Every value is
    released or leased before its section ends. What stays on the device keeps the same slots in every section."""
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
    """Maps each slot whose contents outlive sections to its tile."""
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
    """The checkpoint that a `stash` or `stashed` node writes or takes."""
    return argument(node, "call"), argument(node, "mb")


def _waits(node: fx.Node, awaited: set[Stashed]) -> bool:
    """True if a node stashes a checkpoint that a later section takes."""
    return op_of(node).name == "stash" and stashed_by(node) in awaited


def _lives(name: str, graph: fx.Graph, awaited: set[Stashed]) -> Iterator[Fault]:
    """Checks the lifetimes of values. `awaited`: the checkpoints that later sections take from host memory."""
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


_LANES = tuple(Lane)
_INDEX = {lane: i for i, lane in enumerate(_LANES)}


@dataclass(frozen=True)
class Clock:
    """A lower bound of each lane's progress. `done[i]`: how many of lane i's nodes in this section are done; 0: only its whole
    past; -1: not even its past. `past`: a set of bits, one for each access (place, access, lane) of the past that is done
    although later accesses of that lane may not be."""

    done: tuple[int, ...]
    past: int = 0

    def join(self, other: Clock) -> Clock:
        """The clock of everything that is done according to either clock."""
        return Clock(tuple(map(max, self.done, other.done)), self.past | other.past)

    def tick(self, lane: Lane) -> Clock:
        own = _INDEX[lane]
        return Clock((*self.done[:own], self.done[own] + 1, *self.done[own + 1:]), self.past)


@dataclass(frozen=True)
class Hazard:
    """An access that may run while an earlier, conflicting access to the same place still runs. `earlier` made the conflicting
    `access` on `lane`. If that access ran before the section, `earlier` is None, and `enter(place, access, lane)` is the event
    to wait for."""

    place: str
    node: fx.Node
    earlier: fx.Node | None
    access: Access
    lane: Lane


class Clocks:
    """Runs the nodes of one section in program order.

        clocks = Clocks(program.processes > 1)
        for node in nodes(graph):
            for hazard in clocks.hazards(node): ...       # conflicts that nothing orders
            clocks.step(node)
    """

    def __init__(self, several_ranks: bool = False) -> None:
        self.several_ranks = several_ranks
        unknown = Clock((-1,) * len(_INDEX))
        self._lanes = {lane: unknown.tick(lane) for lane in Lane}
        self._after: dict[fx.Node, Clock] = {}  # what is done once a node is, or an event has fired
        self._position: dict[fx.Node, int] = {}
        self._accesses: dict[str, dict[tuple[Lane, Access], fx.Node]] = {}
        self._bits: dict[tuple[str, Access, Lane], int] = {}

    def hazards(self, node: fx.Node) -> Iterator[Hazard]:
        """Earlier accesses that conflict with this node's and may still be running when its lane reaches it: the latest of each
        lane and kind. A read conflicts with writes of other lanes, a write with all accesses of other lanes."""
        lane = lane_of(node)
        if lane is None:
            return
        known = self._lanes[lane]
        for place, access in accesses(node):
            for earlier_access in (Access.WRITE,) if access == Access.READ else (Access.WRITE, Access.READ):
                for other in _LANES:
                    if other == lane:
                        continue
                    earlier = self._accesses.get(place, {}).get((other, earlier_access))
                    if earlier is not None:  # its lane's past comes before it
                        if known.done[_INDEX[other]] < self._position[earlier]:
                            yield Hazard(place, node, earlier, earlier_access, other)
                    elif (self._in_past(place, earlier_access, other) and known.done[_INDEX[other]] < 0
                            and not known.past & self._bit(place, earlier_access, other)):
                        yield Hazard(place, node, None, earlier_access, other)

    def step(self, node: fx.Node) -> None:
        """Advances the node's lane: it waits, or completes the node, whose accesses are known from now on."""
        op, lane = op_of(node).name, lane_of(node)
        if op == "enter":
            self._after[node] = self._entered(node)
        if lane is None:
            return
        if op == "wait":
            self._lanes[lane] = self._lanes[lane].join(self._after[operands(node, "event")[0]])
            return
        self._lanes[lane] = self._after[node] = self._lanes[lane].tick(lane)
        self._position[node] = self._lanes[lane].done[_INDEX[lane]]
        for place, access in accesses(node) if not op_of(node).only_waits else ():
            self._accesses.setdefault(place, {})[lane, access] = node

    def last(self) -> dict[tuple[str, Lane], dict[Access, fx.Node]]:
        """For each place that other sections know, and each lane that accessed it: the last node of each access."""
        found: dict[tuple[str, Lane], dict[Access, fx.Node]] = {}
        for place, here in self._accesses.items():
            if place_kind(place) is not None:
                for (lane, access), node in here.items():
                    found.setdefault((place, lane), {})[access] = node
        return found

    def known_to(self, node: fx.Node, lanes: Iterable[Lane]) -> bool:
        """True if each of these lanes is ordered after `node` from here on. `node` is an executed node of another lane."""
        own = lane_of(node)
        assert own is not None, f"{node.name} runs on no lane"
        return all(self._lanes[lane].done[_INDEX[own]] >= self._position[node] for lane in lanes)

    def covers(self, event: fx.Node, node: fx.Node) -> bool:
        """True if a recorded event fires only after an executed node is done."""
        lane = lane_of(node)
        assert lane is not None, f"{node.name} runs on no lane"
        return self._after[event].done[_INDEX[lane]] >= self._position[node]

    def _entered(self, node: fx.Node) -> Clock:
        """The clock that an `enter` gives. The event of a lane's last access of any kind ("read") covers its last write too."""
        place, access, lane = argument(node, "place"), argument(node, "access"), Lane(argument(node, "lane"))
        bits = self._bit(place, Access.WRITE, lane)
        if access == Access.READ:
            bits |= self._bit(place, Access.READ, lane)
        return Clock((-1,) * len(_INDEX), bits)

    def _bit(self, place: str, access: Access, lane: Lane) -> int:
        return 1 << self._bits.setdefault((place, access, lane), len(self._bits))

    def _in_past(self, place: str, access: Access, lane: Lane) -> bool:
        kind = place_kind(place)
        return kind is not None and lane in lanes_that(access, kind, self.several_ranks)
