"""Simulates a program: when each instruction starts and ends, how long a step takes, and which lane binds.

A discrete-event simulation with the executor's rules. Each lane takes its instructions in program order; `wait` holds a lane
until an event has fired; `enter` finds the events that earlier sections left. Lanes that are busy at the same time may slow
each other down (both directions of a link, the optimizer beside copies). So an instruction has an amount of work, the seconds
that it takes alone, and a speed that changes whenever a lane starts or stops.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tabulate import tabulate
from torch import fx

from megacompile.ir.program import Access, Lane, Program, argument, lane_of, nodes, op_of, operands
from megacompile.runtime.frame import CarriedEvents

#: The lanes that the caller's loop waits for: after a backward all, until gradients are in host memory; after a whole step only
#: compute, for the loss.
_WAITS_FOR = {"backward": tuple(Lane), "backward_accumulate": tuple(Lane), "train_step": (Lane.COMPUTE,)}
#: `_WAITS_FOR` for a backward that updates on arrival and leaves no gradients to read: the loop waits only for compute.
_WAITS_ON_ARRIVAL = {**_WAITS_FOR, "backward": (Lane.COMPUTE,)}

#: Ops that run in a lane and take no time.
_TIMELESS = ("record", "release", "wait")

Speeds = Callable[[frozenset[Lane]], Mapping[Lane, float]]


def alone(busy: Collection[Lane]) -> Mapping[Lane, float]:
    """The speeds of lanes that do not slow each other down."""
    return dict.fromkeys(busy, 1.0)


@dataclass(eq=False)
class Item:
    """One instruction of one run of a section. Times are in seconds since the beginning of the simulation, or the recording.
    `seconds`: its duration alone (recorded: its actual duration). `waits_for`: for a wait, the last instruction that its event
    covers. `cause`: the instruction that it waited for last."""

    step: int
    section: str
    node: fx.Node
    lane: Lane
    seconds: float
    after: list[Item] = field(repr=False)
    start_s: float = 0.0
    end_s: float = 0.0
    done: bool = False
    cause: Item | None = field(default=None, repr=False)
    waits_for: Item | None = field(default=None, repr=False)


@dataclass(frozen=True)
class StepTimes:
    """The distribution of a step's seconds.

    Attributes:
        step_s: seconds of a step.
        busy_s: seconds of a step in which each lane works.
        critical_s: seconds by lane along the critical path, the chain of instructions that waited for one another. A step
            gets faster only if these do. They add up to `step_s`.
    """

    step_s: float
    busy_s: Mapping[Lane, float]
    critical_s: Mapping[Lane, float]

    def occupancy(self, lane: Lane) -> float:
        """The share of a step in which a lane works, 0 to 1."""
        return self.busy_s[lane] / self.step_s if self.step_s else 0.0

    @property
    def binds(self) -> Lane:
        """The lane with the largest part of the critical path."""
        return max(self.critical_s, key=lambda lane: self.critical_s[lane])

    def table(self) -> str:
        """A row for each lane that works: its busy seconds in a step, their share of it, and its seconds on the critical
        path."""
        rows = [(str(lane), busy, f"{self.occupancy(lane):.1%}", self.critical_s[lane])
                for lane, busy in self.busy_s.items() if busy]
        title = f"step: {self.step_s:.3f} s"
        return title + "\n" + str(tabulate(rows, ["lane", "busy s", "of the step", "critical s"], floatfmt=".3f"))


@dataclass(frozen=True)
class Timeline(StepTimes):
    """A simulated or recorded run. Its step times are those of the last step, since the first ones have no update to wait for.

    Attributes:
        items: instructions in the order of their start.
        steps_s: when each step's last computation ended.
    """

    items: tuple[Item, ...] = field(repr=False)
    steps_s: tuple[float, ...]

    @classmethod
    def of(cls, items: Iterable[Item], steps_s: Sequence[float]) -> Timeline:
        items = tuple(items)
        window = begin, end = _window(steps_s)
        busy, critical = dict.fromkeys(Lane, 0.0), dict.fromkeys(Lane, 0.0)
        for seconds, those in ((busy, items), (critical, _chain(items, window))):
            for item in those:
                seconds[item.lane] += max(0.0, min(item.end_s, end) - max(item.start_s, begin))
        return cls(end - begin, busy, critical, items, tuple(steps_s))

    @property
    def window(self) -> tuple[float, float]:
        """Start and end of the last step: from the end of the previous step's last computation to the end of its own."""
        return _window(self.steps_s)

    def chain(self) -> Iterator[Item]:
        """The critical path of the last step, from its end backwards."""
        return _chain(self.items, self.window)

    def without_items(self) -> StepTimes:
        """Only the step times. Items refer to their programs, thousands of objects that should not be kept for long."""
        return StepTimes(self.step_s, self.busy_s, self.critical_s)


def _window(steps_s: Sequence[float]) -> tuple[float, float]:
    return (steps_s[-2] if len(steps_s) > 1 else 0.0), steps_s[-1]


def _chain(items: Iterable[Item], window: tuple[float, float]) -> Iterator[Item]:
    begin, end = window
    item = max((i for i in items if i.end_s <= end), key=_last_computation, default=None)
    while item is not None and item.end_s > begin:
        yield item
        item = item.cause


def _last_computation(item: Item) -> tuple[float, bool, float]:
    return item.end_s, item.lane == Lane.COMPUTE, item.start_s


def step_of(program: Program) -> tuple[str, ...]:
    """The sections of one training step, in the order in which a loop runs them."""
    order = ("train_step", "update") if "train_step" in program.sections else ("forward", "backward", "update")
    return tuple(name for name in order if name in program.sections)


def simulate(program: Program, seconds: Callable[[fx.Node], float], speeds: Speeds = alone,
             sections: Sequence[str] | None = None, steps: int = 3) -> Timeline:
    """Simulates `steps` runs of `sections` of a synchronized program (None: of a training step). `seconds(node)`: the duration
    of an instruction alone. `speeds(busy lanes)`: the share of each lane's speed that remains."""
    issue = _Issue(program, seconds)
    for step in range(steps):
        for section in step_of(program) if sections is None else sections:
            issue.section(step, section)
    items = run_lanes(issue.lanes, speeds)
    computed = [i for i in items if i.lane == Lane.COMPUTE] or items
    return Timeline.of(items, tuple(max(i.end_s for i in computed if i.step == step) for step in range(steps)))


@dataclass
class _Issue:
    """Instructions by lane, in the order in which they are submitted. State: the events that sections carry, and the
    instructions that the caller waits for before it submits more."""

    program: Program
    seconds: Callable[[fx.Node], float]
    lanes: dict[Lane, list[Item]] = field(default_factory=dict)
    carried: CarriedEvents[Item] = field(default_factory=CarriedEvents)
    barrier: list[Item] = field(default_factory=list)
    instructions: dict[str, list[tuple[fx.Node, str, Lane | None, float]]] = field(default_factory=dict)

    def section(self, step: int, name: str) -> None:
        events: dict[fx.Node, Item | None] = {}
        left: list[tuple[str, Access, Lane, Item]] = []
        begun: set[Lane] = set()
        for node, op, lane, spent in self._instructions(name):
            if op == "enter":
                events[node] = self.carried.enter(argument(node, "place"), Access(argument(node, "access")),
                                                  Lane(argument(node, "lane")))
            elif op == "record":
                assert lane is not None and lane in begun, f"{node.name} has nothing to record"
                events[node] = self.lanes[lane][-1]
            elif op == "leave":
                (recorded,) = operands(node, "event")
                event, where = events[recorded], lane_of(recorded)
                assert event is not None and where is not None
                left.append((argument(node, "place"), Access(argument(node, "access")), where, event))
            elif lane is not None:
                event = events[operands(node, "event")[0]] if op == "wait" else None
                after = [event] if event is not None else []
                if lane not in begun:
                    after += self.barrier
                    begun.add(lane)
                self.lanes.setdefault(lane, []).append(Item(step, name, node, lane, spent, after, waits_for=event))
        self.carried.leave(left)
        waits_for = _WAITS_FOR if "update" in self.program.sections else _WAITS_ON_ARRIVAL
        if name in waits_for:
            self.barrier = [self.lanes[lane][-1] for lane in waits_for[name] if lane in self.lanes]

    def _instructions(self, name: str) -> list[tuple[fx.Node, str, Lane | None, float]]:
        """(node, op, lane, seconds alone) of each node of a section, which are the same in every step."""
        if name not in self.instructions:
            found = ((node, op_of(node).name, lane_of(node)) for node in nodes(self.program.section(name)))
            self.instructions[name] = [(node, op, lane, self.seconds(node) if lane is not None and op not in _TIMELESS else 0.0)
                                       for node, op, lane in found]
        return self.instructions[name]


def run_lanes(lanes: Mapping[Lane, Sequence[Item]], speeds: Speeds) -> list[Item]:
    """Sets the times of all items. Returns them in the order of their start."""
    speeds = functools.cache(speeds)
    heads = dict.fromkeys(lanes, 0)
    working: dict[Lane, Item] = {}
    remaining: dict[Lane, float] = {}
    started: list[Item] = []
    now = 0.0

    def start() -> None:
        """Starts all items that can start now. Items that take no time finish at once, which may let more start."""
        changed = True
        while changed:
            changed = False
            for lane, queue in lanes.items():
                while lane not in working and heads[lane] < len(queue) and all(e.done for e in queue[heads[lane]].after):
                    item = queue[heads[lane]]
                    before = [*item.after, *queue[max(0, heads[lane] - 1):heads[lane]]]
                    item.start_s, item.cause = now, max(before, key=lambda e: e.end_s, default=None)
                    started.append(item)
                    if item.seconds > 0:
                        working[lane], remaining[lane] = item, item.seconds
                    else:
                        finish(lane, item)
                        changed = True

    def finish(lane: Lane, item: Item) -> None:
        item.end_s, item.done = now, True
        heads[lane] += 1

    start()
    while working:
        speed = speeds(frozenset(working))
        passed, first = min((remaining[lane] / speed[lane], lane) for lane in working)
        now += passed
        for lane in list(working):
            remaining[lane] -= passed * speed[lane]
            if lane == first or remaining[lane] <= 0:
                finish(lane, working.pop(lane))
        start()
    stuck = [queue[heads[lane]] for lane, queue in lanes.items() if heads[lane] < len(queue)]
    assert not stuck, f"lanes wait for each other forever: {', '.join(item.node.name for item in stuck)}"
    return started
