"""Runs a program without running it: when each instruction starts and ends, how long a step takes, and what binds.

A discrete-event simulation with the executor's own rules. Each lane takes its instructions in program order; `wait` holds a
lane until an event has fired; `enter` finds the events that earlier sections left. Lanes that are busy at the same time may
slow each other down (both directions of a link, the optimizer beside copies): an instruction has an amount of work, in
seconds alone, and a speed that changes whenever some lane starts or stops.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tabulate import tabulate
from torch import fx

from megacompile.ir.program import Access, Lane, Program, argument, lane_of, nodes, op_of, operands
from megacompile.runtime.run import CarriedEvents

#: When the caller's loop goes on: after a backward, once gradients are home; after a whole step, once it has the loss.
_WAITS_FOR = {"backward": tuple(Lane), "backward_accumulate": tuple(Lane), "train_step": (Lane.COMPUTE,)}
#: After a backward that updates, and leaves no gradients to read, once it has been computed.
_WAITS_ON_ARRIVAL = {**_WAITS_FOR, "backward": (Lane.COMPUTE,)}

#: Ops of a lane that take no time of their own.
_TIMELESS = ("record", "release", "wait")

Speeds = Callable[[frozenset[Lane]], Mapping[Lane, float]]


def alone(busy: Collection[Lane]) -> Mapping[Lane, float]:
    """The speeds of lanes that take nothing from each other."""
    return dict.fromkeys(busy, 1.0)


@dataclass(eq=False)
class Item:
    """One instruction of one run of a section. Times are in seconds since the simulation, or the recording, began.

    `seconds` is how long it takes alone (recorded: how long it took); `behind`, of a wait: the last instruction that its
    event covers; `cause` what it waited for last."""

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
    behind: Item | None = field(default=None, repr=False)


@dataclass(frozen=True)
class StepTimes:
    """How the seconds of a step are spent.

    Attributes:
        step_s: from step to step.
        busy_s: for which each lane works meanwhile.
        critical_s: by lane, along the chain of what waited for one another: what would have to be faster for the step to be.
            They add up to the step.
    """

    step_s: float
    busy_s: Mapping[Lane, float]
    critical_s: Mapping[Lane, float]

    def occupancy(self, lane: Lane) -> float:
        """For which part of the step a lane works, 0 to 1."""
        return self.busy_s[lane] / self.step_s if self.step_s else 0.0

    @property
    def binds(self) -> Lane:
        """The lane that most of the critical chain is in."""
        return max(self.critical_s, key=lambda lane: self.critical_s[lane])

    def table(self) -> str:
        """A row for each lane that works: seconds busy in a step, their part of it, and seconds on the critical chain."""
        rows = [(str(lane), busy, f"{self.occupancy(lane):.1%}", self.critical_s[lane])
                for lane, busy in self.busy_s.items() if busy]
        title = f"step: {self.step_s:.3f} s"
        return title + "\n" + str(tabulate(rows, ["lane", "busy s", "of the step", "critical s"], floatfmt=".3f"))


@dataclass(frozen=True)
class Timeline(StepTimes):
    """A run, simulated or recorded; what it says of a step it says of the last: the first steps have no update before them to
    wait for.

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
        """When the last step begins and ends: from the end of one last computation to the next."""
        return _window(self.steps_s)

    def chain(self) -> Iterator[Item]:
        """The instructions of the last step that waited for one another, from its end backwards."""
        return _chain(self.items, self.window)

    def without_items(self) -> StepTimes:
        """Items hold their programs: thousands of objects, that nobody should keep for long."""
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
    """Runs `sections` of a synchronized program (None: those of a training step) `steps` times over.

    `seconds(node)` is how long an instruction takes alone; `speeds(busy lanes)` what is left of each one's speed."""
    issue = _Issue(program, seconds)
    for step in range(steps):
        for section in step_of(program) if sections is None else sections:
            issue.section(step, section)
    items = run_lanes(issue.lanes, speeds)
    computed = [i for i in items if i.lane == Lane.COMPUTE] or items
    return Timeline.of(items, tuple(max(i.end_s for i in computed if i.step == step) for step in range(steps)))


@dataclass
class _Issue:
    """Instructions by lane, in the order in which they are submitted. State: the events that sections carry, and what the
    caller waits for before it submits more."""

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
                assert lane is not None and lane in begun, f"{node.name} records nothing"
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
                self.lanes.setdefault(lane, []).append(Item(step, name, node, lane, spent, after, behind=event))
        self.carried.leave(left)
        waits_for = _WAITS_FOR if "update" in self.program.sections else _WAITS_ON_ARRIVAL
        if name in waits_for:
            self.barrier = [self.lanes[lane][-1] for lane in waits_for[name] if lane in self.lanes]

    def _instructions(self, name: str) -> list[tuple[fx.Node, str, Lane | None, float]]:
        """Node, op, lane and seconds alone of a section, which are the same in each step."""
        if name not in self.instructions:
            found = ((node, op_of(node).name, lane_of(node)) for node in nodes(self.program.section(name)))
            self.instructions[name] = [(node, op, lane, self.seconds(node) if lane is not None and op not in _TIMELESS else 0.0)
                                       for node, op, lane in found]
        return self.instructions[name]


def run_lanes(lanes: Mapping[Lane, Sequence[Item]], speeds: Speeds) -> list[Item]:
    """Gives every item its times; returns them in the order of their start."""
    speeds = functools.cache(speeds)
    heads = dict.fromkeys(lanes, 0)
    working: dict[Lane, Item] = {}
    remaining: dict[Lane, float] = {}
    started: list[Item] = []
    now = 0.0

    def start() -> None:
        """Starts what can start now; what takes no time is done at once, which may let more start."""
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
