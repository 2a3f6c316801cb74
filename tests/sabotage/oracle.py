"""A second opinion on schedules, by brute force: run lanes in random interleavings over a model of memory.

It knows nothing of clocks. Each place holds a token that stands for its contents; a node's result is a token made of
the node and of the tokens that it read. Program order, one node at a time, says which tokens every node should read.
Then lanes run beside each other, held back by `record` and `wait` alone: a node reads when it begins and again when
it ends, and what it writes is garbage in between, as with a copy or a kernel under way. A node that reads other
tokens than in program order, or whose result was overwritten before it ended, shows a race; lanes that all wait show
a deadlock.
"""
from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from megacompile.program import Access, Lane, accesses, argument, lane_of, nodes, op_of, operands

Identity = tuple[int, str]  # the how-manieth section of the sequence, the node's name


@dataclass(frozen=True)
class Step:
    """What one lane does for one node. `event` is waited for or fired; other steps read and write places."""

    identity: Identity
    waits: bool = False
    event: Identity | None = None
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass
class Work:
    """Sections run one after the other, with the events that they hand on: what each lane does, and program order."""

    lanes: dict[Lane, list[Step]] = field(default_factory=lambda: {lane: [] for lane in Lane})
    order: list[Step] = field(default_factory=list)


def compile_sequence(sections: Sequence[fx.Graph]) -> Work:
    found = Work()
    handed_on: dict[tuple[str, str, Lane], Identity] = {}  # (place, access, lane) -> the event of the last one
    for run, graph in enumerate(sections):
        past = dict(handed_on)
        entered: dict[fx.Node, Identity | None] = {}
        for node in nodes(graph):
            op, lane, identity = op_of(node).name, lane_of(node), (run, node.name)
            if op == "enter":
                entered[node] = past.get((argument(node, "place"), argument(node, "access"), argument(node, "lane")))
            elif op == "leave":
                (event,) = operands(node, "event")
                where = lane_of(event)
                assert where is not None
                handed_on[argument(node, "place"), "read", where] = (run, event.name)
                if argument(node, "access") == Access.WRITE:
                    handed_on[argument(node, "place"), "write", where] = (run, event.name)
            elif op == "wait":
                assert lane is not None
                (event,) = operands(node, "event")
                fired = entered.get(event, (run, event.name))
                if fired is not None:  # None: no section before did this
                    found.lanes[lane].append(Step(identity, True, fired))
            elif lane is not None:
                touched: dict[Access, list[str]] = {Access.READ: [], Access.WRITE: []}
                for place, access in accesses(node):  # a value's own memory is another one in each run of a section
                    touched[access].append(f"{run}{place}" if place.startswith("%") else place)
                step = Step(identity, False, identity if op == "record" else None,
                            tuple(touched[Access.READ]), tuple(touched[Access.WRITE]))
                found.lanes[lane].append(step)
                found.order.append(step)
    return found


def meaning(sections: Sequence[fx.Graph]) -> dict[Identity, tuple[int, ...]]:
    """The tokens that each node reads in program order."""
    memory: dict[str, int] = {}
    read = {}
    for step in compile_sequence(sections).order:
        read[step.identity] = tuple(memory.get(place, 0) for place in step.reads)
        for place in step.writes:
            memory[place] = hash((step.identity, read[step.identity]))
    return read


def find_race(sections: Sequence[fx.Graph], expected: dict[Identity, tuple[int, ...]], interleavings: int,
              seed: int = 0) -> str | None:
    """What went wrong in the first of so many random interleavings that did not match, or None."""
    work = compile_sequence(sections)
    for step in work.order:  # an edit may already have changed what program order means
        if step.identity not in expected:
            return f"{step.identity} is new"
    for number in range(interleavings):
        wrong = _interleave(work, expected, random.Random(f"{seed}.{number}"))
        if wrong is not None:
            return f"{wrong} (interleaving {number})"
    return None


def _interleave(work: Work, expected: dict[Identity, tuple[int, ...]], rng: random.Random) -> str | None:
    memory: dict[str, object] = {}
    fired: set[Identity] = set()
    at = dict.fromkeys(Lane, 0)
    under_way: set[Lane] = set()
    # In each run some lanes are up to a thousand times slower than others: a race needs a straggler.
    speed = {lane: 10 ** rng.uniform(-3, 0) for lane in Lane}
    while True:
        ready = [lane for lane in Lane if lane in under_way or _may_begin(work.lanes[lane], at[lane], fired)]
        if not ready:
            stuck = [str(lane) for lane in Lane if at[lane] < len(work.lanes[lane])]
            return f"deadlock of {', '.join(stuck)}" if stuck else None
        (lane,) = rng.choices(ready, [speed[lane] for lane in ready])
        step = work.lanes[lane][at[lane]]
        garbage = ("under way", lane, step.identity)
        if step.waits:
            at[lane] += 1
            continue
        for place, token in zip(step.reads, expected[step.identity], strict=True):
            mine = lane in under_way and place in step.writes
            if memory.get(place, 0) != (garbage if mine else token):
                return f"{step.identity} reads other contents of {place} than in program order"
        if lane not in under_way:
            under_way.add(lane)
            memory.update(dict.fromkeys(step.writes, garbage))
            continue
        if any(memory[place] != garbage for place in step.writes):
            return f"{step.identity} is overwritten before it ends"
        memory.update(dict.fromkeys(step.writes, hash((step.identity, expected[step.identity]))))
        if step.event is not None:
            fired.add(step.event)
        under_way.remove(lane)
        at[lane] += 1


def _may_begin(steps: list[Step], at: int, fired: set[Identity]) -> bool:
    return at < len(steps) and (not steps[at].waits or steps[at].event in fired)
