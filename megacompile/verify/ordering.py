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

from megacompile.ir.program import Access, Lane, accesses, argument, lane_of, lanes_that, op_of, operands, place_kind

_LANES = tuple(Lane)
_INDEX = {lane: i for i, lane in enumerate(_LANES)}


@dataclass(frozen=True)
class Clock:
    """How far each lane certainly is.

    `done[i]`: how many of lane i's nodes in this section are done; 0: only its whole past; -1: not even its past. `past` is a
    set of bits, one for each access (place, access, lane) of the past that is done while later ones of that lane may not
    be."""

    done: tuple[int, ...]
    past: int = 0

    def join(self, other: Clock) -> Clock:
        """What is done where both clocks hold."""
        return Clock(tuple(map(max, self.done, other.done)), self.past | other.past)

    def tick(self, lane: Lane) -> Clock:
        own = _INDEX[lane]
        return Clock((*self.done[:own], self.done[own] + 1, *self.done[own + 1:]), self.past)


@dataclass(frozen=True)
class Hazard:
    """An access that may run while an earlier, conflicting access to the same place is still running.

    `earlier` made the conflicting `access` on `lane`. It is None where that access ran before the section;
    `enter(place, access, lane)` is the event to wait for then."""

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
        """Earlier accesses that conflict with this node's and may still be running when its lane gets to it: the latest of
        each lane and kind. A read conflicts with writes of other lanes, a write with all accesses of other lanes."""
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
        """Advances the node's lane: it waits, or is done with one more node, whose accesses are known from now on."""
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
        """For each place that other sections know and each lane that accessed it: the last node of each access."""
        found: dict[tuple[str, Lane], dict[Access, fx.Node]] = {}
        for place, here in self._accesses.items():
            if place_kind(place) is not None:
                for (lane, access), node in here.items():
                    found.setdefault((place, lane), {})[access] = node
        return found

    def known_to(self, node: fx.Node, lanes: Iterable[Lane]) -> bool:
        """Whether each of these lanes is ordered, from here on, after `node`, an executed node of another lane."""
        own = lane_of(node)
        assert own is not None, f"{node.name} runs on no lane"
        return all(self._lanes[lane].done[_INDEX[own]] >= self._position[node] for lane in lanes)

    def covers(self, event: fx.Node, node: fx.Node) -> bool:
        """Whether a recorded event fires only after an executed node is done."""
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
