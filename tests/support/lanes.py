"""What runs beside what: lanes go as far as they can, and for each step it is known which steps are over before it begins."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from machine import LANES, NOWHERE, Step


@dataclass
class Reach:
    """Which steps are over, for certain, before each step begins: sets of steps as bits of a number."""

    before: dict[int, int]
    lanes: dict[str, int]  # what is over once a lane is at its end
    events: dict[Any, int]
    stuck: list[str]


def reach(steps: Sequence[Step], past: Mapping[str, int] | None = None, entered: Mapping[Any, int] | None = None) -> Reach:
    """Lets lanes go as far as they can. `past`: what is over on each lane before it begins; `entered`: events of the past."""
    queues: dict[str, list[int]] = {lane: [] for lane in LANES}
    for number, step in enumerate(steps):
        if step.lane != NOWHERE:
            queues[step.lane].append(number)
    over = {lane: (past or {}).get(lane, 0) for lane in LANES}
    events: dict[Any, int] = dict(entered or {})
    found = Reach({}, over, events, [])
    at = dict.fromkeys(LANES, 0)
    moved = True
    while moved:
        moved = False
        for lane, queue in queues.items():
            while at[lane] < len(queue):
                number = queue[at[lane]]
                step = steps[number]
                if step.op == "wait":
                    if step.event not in events:
                        break
                    over[lane] |= events[step.event]
                elif step.op == "record":
                    events[step.event] = over[lane]
                else:
                    found.before[number] = over[lane]
                    over[lane] |= 1 << number
                at[lane] += 1
                moved = True
    found.stuck = [steps[queue[at[lane]]].name for lane, queue in queues.items() if at[lane] < len(queue)]
    return found


@dataclass
class Touched:
    """Who has touched a place so far, as bits: writers and all, by lane."""

    writers: dict[str, int] = field(default_factory=dict)
    everybody: dict[str, int] = field(default_factory=dict)

    def add(self, lane: str, bit: int, writes: bool) -> None:
        self.everybody[lane] = self.everybody.get(lane, 0) | bit
        if writes:
            self.writers[lane] = self.writers.get(lane, 0) | bit

    def conflicts(self, lane: str, writes: bool) -> int:
        """Those of other lanes that must be over before this lane may read, or write."""
        bits = 0
        for other, found in (self.everybody if writes else self.writers).items():
            if other != lane:
                bits |= found
        return bits


def races(steps: Sequence[Step], found: Reach, places: dict[str, Touched]) -> tuple[int, int, str] | None:
    """The first two steps that collide, as (earlier, later, place). `places`: who touched them before; new ones are added."""
    for number, step in enumerate(steps):
        if step.event is not None or step.lane == NOWHERE:
            continue
        before = found.before.get(number, 0)
        for writes, touched in ((False, step.reads), (True, step.writes)):
            for place in touched:
                here = places.setdefault(place, Touched())
                missing = here.conflicts(step.lane, writes) & ~before
                if missing:
                    return missing.bit_length() - 1, number, place
                if not step.only_waits:
                    here.add(step.lane, 1 << number, writes)
    return None


def witness(steps: Sequence[Step], held: int, later: int) -> bool:
    """Whether `later` begins while everything else runs and `held` does not end: each lane by itself, no sets."""
    waiting = {lane: [n for n, s in enumerate(steps) if s.lane == lane] for lane in LANES}
    fired: set[Any] = set()
    moved = True
    while moved:
        moved = False
        for queue in waiting.values():
            while queue and queue[0] != held and not (steps[queue[0]].op == "wait" and steps[queue[0]].event not in fired):
                if queue[0] == later:
                    return True
                if steps[queue[0]].op == "record":
                    fired.add(steps[queue[0]].event)
                queue.pop(0)
                moved = True
    return False
