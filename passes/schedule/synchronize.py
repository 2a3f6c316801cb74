"""Inserts the fewest events that order every hazard between lanes.

    w2 = prefetch("layers.2", into="W0")                   # h2d
    e2 = record(w2)
    wait("compute", e2)                                    # read after write: Weights-Ready
    h3_0 = forward("decoder", "layers.2", mb=0, ...)       # compute
    e3 = record(h3_0)
    wait("h2d", e3)                                        # write after read: Buffer-Free
    w4 = prefetch("layers.4", into="W0")

For each node, each earlier access that conflicts and is not yet known to be done in the node's lane gets a wait, the latest
access first. The first access to a place waits for the `enter` events of every lane that might have used it. Each section
hands on its last accesses with `leave`.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from megacompile.ir.plan import Plan
from megacompile.ir.program import (
    Access,
    Builder,
    Lane,
    Program,
    accesses,
    lane_of,
    lanes_against,
    lanes_that,
    nodes,
    op_of,
    place_kind,
)

name, requires, provides = "synchronize", "place", "synchronize"

#: The known progress of each lane: position in the section, per lane.
Known = dict[Lane, int]


@dataclass
class _History:
    """A section's accesses to one place: the last write, the reads since then, and the last access of each lane."""

    writer: fx.Node | None = None
    readers: dict[Lane, fx.Node] = field(default_factory=dict)  # since the last write
    last: dict[Lane, tuple[fx.Node, Access]] = field(default_factory=dict)  # in the section: `leave` hands these on


def run(program: Program, plan: Plan) -> Program:
    return program.evolve(stage=provides, sections={
        name: _Synchronizer(graph, program.processes > 1).graph() for name, graph in program.sections.items()})


class _Synchronizer:
    """Chooses the waits in one walk over a section, then rebuilds the section with them."""

    def __init__(self, section: fx.Graph, several_ranks: bool) -> None:
        self.section, self.several_ranks = section, several_ranks
        self.position = {node: i for i, node in enumerate(nodes(section))}
        self.known: dict[Lane, Known] = {lane: dict.fromkeys(Lane, -1) for lane in Lane}
        self.past = dict.fromkeys(Lane, 0)  # as bits: accesses before the section that each lane knows to be done
        self.bits: dict[tuple[str, Access, Lane], int] = {}
        self.done: dict[fx.Node, Known] = {}  # what is known once a node is done
        self.past_done: dict[fx.Node, int] = {}
        self.places: dict[str, _History] = {}
        self.waits: dict[fx.Node, list[fx.Node]] = {}  # node -> nodes whose events its lane waits for
        self.enters: dict[fx.Node, list[tuple[str, Access, Lane]]] = {}
        for node in nodes(section):
            if lane_of(node) is not None:
                self._visit(node)
        self.recorded = {producer for producers in self.waits.values() for producer in producers}
        self.leaves = [(place, access, node) for place, history in self.places.items() if (kind := place_kind(place))
                       for node, access in history.last.values() if not self._known_to_all(node, access, place, kind)]

    def _known_to_all(self, node: fx.Node, access: Access, place: str, kind: str) -> bool:
        """True if an access needs no `leave`: nothing waits for it, and every other lane that may conflict with it is ordered
        after it, or must wait anyway for a later access to the place."""
        own, at = lane_of(node), self.position[node]
        assert own is not None
        later = [done for lane, (other, done) in self.places[place].last.items() if lane != own and self.done[other][own] >= at]

        def waits(lane: Lane) -> bool:
            writes_only = access == Access.READ or lane not in lanes_that(Access.READ, kind, self.several_ranks)
            return Access.WRITE in later or (writes_only and Access.READ in later)

        return node not in self.recorded and all(
            self.known[lane][own] >= at or waits(lane) for lane in lanes_against(access, kind, self.several_ranks) - {own})

    def _visit(self, node: fx.Node) -> None:
        lane = lane_of(node)
        assert lane is not None
        touched = accesses(node)
        before: list[fx.Node] = []
        for place, access in touched:
            history = self.places.setdefault(place, _History())
            if history.writer is not None:
                before.append(history.writer)
            if access == Access.WRITE:
                before += history.readers.values()
        self._order(node, lane, before)
        for place, access in touched:
            if access == Access.WRITE or (place, Access.WRITE) not in touched:  # what a write waits for covers a read
                self._enter(node, lane, place, access)
        self.known[lane][lane] = self.position[node]
        self.done[node], self.past_done[node] = dict(self.known[lane]), self.past[lane]
        for place, access in touched if not op_of(node).only_waits else ():
            self._remember(node, lane, place, access)

    def _enter(self, node: fx.Node, lane: Lane, place: str, access: Access) -> None:
        """Orders the first access to a place after what ran before the section. No `enter` is needed if the section has already
        written the place, or if the node's lane has waited for an event that the other lane recorded in this section. That
        event is after the other lane's whole past, and after everything that lane had waited for."""
        kind, history = place_kind(place), self.places[place]
        if kind is None or history.writer is not None:
            return
        # A reader waits for writers; a writer waits for every lane that may have accessed the place.
        # (`enter` of a read is the event of the lane's last access of any kind.)
        others, past = lanes_that(Access.WRITE, kind, self.several_ranks), Access.WRITE
        if access == Access.WRITE:
            others, past = others | lanes_that(Access.READ, kind, self.several_ranks), Access.READ
        for other in sorted(others):
            waited = self._bit(place, Access.WRITE, other) | self._bit(place, past, other)
            if other != lane and self.known[lane][other] < 0 and waited & ~self.past[lane]:
                self.past[lane] |= waited
                self.enters.setdefault(node, []).append((place, past, other))

    def _bit(self, place: str, access: Access, lane: Lane) -> int:
        return 1 << self.bits.setdefault((place, access, lane), len(self.bits))

    def _order(self, node: fx.Node, lane: Lane, before: list[fx.Node]) -> None:
        known = self.known[lane]
        chosen: list[fx.Node] = []
        for other in sorted(set(before), key=self.position.__getitem__, reverse=True):
            there = lane_of(other)
            assert there is not None
            if there != lane and known[there] < self.position[other]:
                chosen.append(other)
                for each, at in self.done[other].items():
                    known[each] = max(known[each], at)
                self.past[lane] |= self.past_done[other]
        if chosen:
            self.waits[node] = chosen

    def _remember(self, node: fx.Node, lane: Lane, place: str, access: Access) -> None:
        history = self.places[place]
        if access == Access.WRITE:
            history.writer, history.readers = node, {}
        else:
            history.readers[lane] = node
        past = history.last.get(lane, (node, access))[1]
        history.last[lane] = (node, Access.WRITE if Access.WRITE in (past, access) else Access.READ)

    def graph(self) -> fx.Graph:
        """The section with its events: `enter` first, each `wait` right before the node that needs it, each `record` right
        after the node that it reports, `leave` last."""
        new = fx.Graph()
        build = Builder(new, name)
        entered = {what: build.add("enter", "e", place=what[0], access=str(what[1]), lane=str(what[2]))
                   for what in dict.fromkeys(what for whats in self.enters.values() for what in whats)}
        recorded = self.recorded | {node for _, _, node in self.leaves}
        events: dict[fx.Node, fx.Node] = {}
        image: dict[fx.Node, fx.Node] = {}
        for node in nodes(self.section):
            lane = lane_of(node)
            for what in self.enters.get(node, ()):
                build.add("wait", lane=str(lane), event=entered[what])
            for producer in self.waits.get(node, ()):
                build.add("wait", lane=str(lane), event=events[producer])
            arguments: dict[str, Any] = {k: fx.map_arg(v, lambda n: image[n]) for k, v in node.kwargs.items()}
            image[node] = build.add(op_of(node).name, node.name, **arguments)
            image[node].meta["pass"] = node.meta.get("pass", "")
            if node in recorded:
                events[node] = build.add("record", "e", node=image[node])
        for place, access, node in self.leaves:
            build.add("leave", place=place, access=str(access), event=events[node])
        return new
