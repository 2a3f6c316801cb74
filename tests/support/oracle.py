"""A second opinion on schedules, by brute force: what can run beside what, and what then is in memory.

It shares nothing with the verifier: no clocks, no rules, no table of ops (`machine.py` has its own). A program is harmful if

- in program order some step reads what nobody has written or what was released, or the caller's results, the host's
  weights, gradients and optimizer state, or the memory that stays taken are others than those of the program before the edit;
- some lanes wait for ever;
- two steps, of which one writes what the other touches, may run beside each other, or in the other order: in the sections
  of a training loop, or after or before any section that the language allows (`beside_any_section`).

Which steps may run beside each other is found by walking the lanes as far as they go and keeping, for each step, the
whole set of steps that are over before it begins. Each race found is then run: with the earlier step held back, the later
one must begin (`witness`). `interleave` runs lanes at random, contents and all: without races, whatever the interleaving,
every step must read what it reads in program order.
"""
from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from contents import Content, effect
from lanes import Touched, races, reach, witness
from machine import (
    ALONE,
    LANES,
    MAY_TOUCH,
    MAY_TOUCH_OF_SEVERAL,
    NOWHERE,
    OF_SEVERAL,
    READ,
    WRITE,
    HarmError,
    Instruction,
    Job,
    Machine,
    Step,
    instructions,
    kind_of,
)

from megacompile.ir.program import Program

Section = list[Instruction]
#: (section, the forward that it opens or goes back): one line of a loop.
Loop = tuple[tuple[str, int | None], ...]
_RELEASED = object()
_INITIAL = ("weights", "state", "moments", "announced")


def loops(sections: Mapping[str, Section]) -> list[Loop]:
    """What a user's loop may do with the sections that there are, as short as can be: steps one after the other, two open
    forwards, whose backwards come in either order, and evaluations between. `*_lost` is what the host suffers before the
    section after it mends it: gradients that the user changes, weights that a failed update leaves on the device."""
    def there(*lines: tuple[str, int | None]) -> Loop:
        return tuple(line for line in (("load", None), *lines, ("store", None)) if line[0].removesuffix("_lost") in sections)

    update, evaluate = ("update", None), ("evaluate", None)
    refresh, rescue = (("refresh_lost", None), ("refresh", None)), (("rescue_lost", None), ("rescue", None))
    if "train_step" in sections:
        return [there(("train_step", 0), update, ("train_step", 1), update, ("train_step", 2), update, *rescue)]
    if "forward" not in sections:
        return [there(evaluate, evaluate)]
    first = there(("forward", 0), ("backward", 0), *refresh, update, ("forward", 1), evaluate, ("backward", 1), update, *rescue,
                  evaluate)
    if "backward_accumulate" not in sections:
        return [first]
    return [first, *(there(("forward", 0), ("forward", 1), ("backward", a), ("backward_accumulate", b), update, evaluate)
                     for a, b in ((0, 1), (1, 0)))]


def link(sections: Mapping[str, Section], loop: Loop, job: Job | None = None) -> list[Step]:
    """All steps of a loop, in program order. `job`: who runs it; None: one process."""
    machine, steps = Machine(job or Job()), list[Step]()
    for name, lease in loop:
        if name.endswith("_lost"):
            part = {"refresh": "gradients", "rescue": "weights"}[name.removesuffix("_lost")]
            steps += [Step(name, "lost", NOWHERE, (), (f"{part}/{tile}",)) for tile in sorted(
                {each.says["tile"] for each in sections[name.removesuffix("_lost")] if "tile" in each.says})]
            continue
        steps += machine.wait_for_updates() if name in ALONE else []
        steps += machine.run(sections[name], lease)
        if lease is not None and name != "forward":
            machine.give_back(lease)
    return steps


# Program order

@dataclass
class Meaning:
    """What a loop computes: what each step reads, what the caller gets and what is left where."""

    reads: list[tuple[Content, ...]] = field(default_factory=list)
    results: list[Content] = field(default_factory=list)
    host: dict[str, Content] = field(default_factory=dict)
    taken: int = 0  # memory of values' own that nobody has released
    announced: int = 0  # how often other ranks were told of updates, each time of one more

    def same(self, other: Meaning) -> bool:
        return all(getattr(self, what) == getattr(other, what) for what in ("results", "host", "taken", "announced"))


class Memory(dict[str, Content]):
    """Contents by place. Host tiles are there from the beginning."""

    def look(self, place: str) -> Content:
        if place not in self and kind_of(place) in _INITIAL:
            self[place] = hash(place.replace("announced", "weights").replace("moments/", "state/"))
        if place not in self or self[place] is _RELEASED:
            raise HarmError(f"{place} is read {'after its release' if place in self else 'and nobody has written it'}")
        return self[place]


def meaning(steps: Sequence[Step]) -> Meaning:
    memory, found = Memory(), Meaning()
    for step in steps:
        if step.event is not None:
            found.reads.append(())
            continue
        if step.op in ("release", "lost"):
            memory[step.writes[0]] = _RELEASED if step.op == "release" else hash(("lost", step.writes[0]))
            found.reads.append(())
            continue
        read: list[Content] = []

        def look(place: str, read: list[Content] = read) -> Content:
            read.append(memory.look(place))
            return read[-1]

        memory.update(effect(step, look))
        found.reads.append(tuple(read))
        if step.op == "result":
            found.results.append((step.says["key"], *read))
        found.announced += step.op == "announce"
    found.host = {place.replace("moments/", "state/"): content for place, content in memory.items() if "/" in place}
    found.taken = sum(place.startswith("%") and content is not _RELEASED for place, content in memory.items())
    return found


# Lanes

def collision(steps: Sequence[Step]) -> str | None:
    """What lanes can do wrong in a loop, each step of which has a meaning."""
    found = reach(steps)
    if found.stuck:
        return f"{', '.join(found.stuck)} wait for ever"
    race = races(steps, found, {})
    if race is None:
        return None
    earlier, later, place = race
    assert witness(steps, earlier, later), "the oracle names a race that cannot happen"
    return f"{steps[later].name} may touch {place} before {steps[earlier].name} is over"


def beside_any_section(section: Section, several: bool = False, known: dict[tuple[int, str], Step] | None = None) -> str | None:
    """The same of one section after any other, and before any other. `several`: of programs of several ranks. `known`: steps
    of sections that differ in waits and events alone (see `Machine`).

    What ran before may have touched every place in every way that the language has; of each such access only its own event
    says that it is over, and whatever its lane does from here on. What comes after waits for everything that is handed on
    and that it could collide with."""
    may_touch = MAY_TOUCH_OF_SEVERAL if several else MAY_TOUCH
    known = {} if known is None else known
    steps = Machine(known=known).run(section, 0)
    touched = {place for step in steps for place in (*step.reads, *step.writes)}
    places = {place: Touched() for place in touched}
    past, events, names, machine = dict.fromkeys(LANES, 0), dict[Any, int](), dict[int, str](), Machine(known=known)
    bit = 1 << max(len(section), len(steps))
    for place in sorted(touched):
        for lane, access in sorted(may_touch.get(kind_of(place), ())):
            names[bit.bit_length() - 1] = f"a {access} on {lane} by an earlier section"
            places[place].add(lane, bit, access == WRITE)
            past[lane] |= bit
            last, last_write = (place, lane, READ), (place, lane, WRITE)
            machine.carried.setdefault(place, {})[lane] = last, last_write
            events[last] = events.get(last, 0) | bit
            events[last_write] = events.get(last_write, 0) | (bit if access == WRITE else 0)
            bit <<= 1
    steps = machine.run(section, 0)
    found = reach(steps, past, events)
    if found.stuck:
        return f"{', '.join(found.stuck)} wait for ever"
    race = races(steps, found, places)
    if race is not None:
        number, later, place = race
        return f"{steps[later].name} may touch {place} before {names.get(number) or steps[number].name} is over"
    for place in sorted(touched):
        for lane, access in sorted(may_touch.get(kind_of(place), ())):
            over = found.lanes[lane]
            for other, (last, last_write) in machine.carried.get(place, {}).items():
                event = last if access == WRITE else last_write
                over |= found.events.get(event, 0) if other != lane else 0
            if missing := places[place].conflicts(lane, access == WRITE) & ~over:
                number = missing.bit_length() - 1
                earlier = names.get(number) or steps[number].name
                return f"a later {access} of {place} on {lane} may begin before {earlier} is over"
    return None


#: The bytes of a tile that an op's result has.
_BYTES = {"pack": "weight_bytes", "prefetch": "weight_bytes", "resident": "weight_bytes", "reduce": "gradient_bytes",
          "offload": "gradient_bytes", "resident_gradients": "gradient_bytes", "fetch_gradients": "gradient_bytes",
          "resident_state": "state_bytes", "fetch_state": "state_bytes", "gather": "weight_bytes",
          "read_state": "disk_bytes"}
_CHUNK = 1 << 25  # bytes of a tile that visit the device at once, at most


def result_bytes(program: Program, each: Instruction) -> int:
    """Bytes of what stands in a slot. Weights stand there whole; of anything else a rank has its shard, and all norms."""
    if "tile" in each.says:
        tile, ranks = program.tiles[each.says["tile"]], program.ranks
        if each.op in ("hold", "held"):
            return int(tile.weight_bytes + tile.gradient_bytes + tile.state_bytes)
        if each.op == "update_visiting":  # weights and gradients are of one size
            return int(max(tile.visit_bytes, min(_CHUNK, (tile.state_bytes + 2 * tile.weight_bytes) // ranks)))
        if each.op == "momentum":
            return int(tile.weight_bytes + tile.visit_bytes)
        if each.op in ("pack_shard", "prefetch_shard"):
            return int(tile.weight_bytes // ranks)
        size, norms = getattr(tile, _BYTES[each.op]), tile.gradient_bytes - tile.weight_bytes
        match _BYTES[each.op]:
            case "weight_bytes" | "disk_bytes":
                return int(size)
            case "state_bytes":
                return int(size // ranks)
        return int((size - norms) // ranks + norms)
    (output,) = (call.output_bytes for call in program.calls if call.name == each.says["call"])
    return int(output) * program.micro_batches[each.says["mb"]]


def overflow(program: Program, section: Section) -> str | None:
    for each in section:
        if "into" in each.says and result_bytes(program, each) > program.slots[each.says["into"]].bytes:
            return f"{each.name} is larger than {each.says['into']}"
    return None


def stranger(section: Section, job: Job, name: str) -> str | None:
    """What is wrong with who runs a section: other ranks do not run it, or run it and update what it copies."""
    together = name not in ALONE
    for each in section:
        if each.op in OF_SEVERAL and not (together and job.several):
            return f"{each.name} waits for ranks that do not run {name}"
        if each.op in ("pack", "prefetch") and together and job.ranks > 1:
            return f"{each.name} copies shards that other ranks may be updating"
    return None


# The verdict

class Oracle:
    """Judges programs that come from one program by edits. `expected`: what each loop of that program computes."""

    def __init__(self, program: Program) -> None:
        self.sections = {name: instructions(graph) for name, graph in program.sections.items()}
        self.loops = loops(self.sections)
        self.job = Job(program.ranks, program.hosts)
        self.expected = [meaning(link(self.sections, loop, self.job)) for loop in self.loops]

    def harm(self, edited: Program, name: str) -> str | None:
        """What goes wrong in a program whose section of that name was edited; None: nothing does."""
        section = instructions(edited.section(name))
        sections = {**self.sections, name: section}
        try:
            if (wrong := overflow(edited, section)) is not None:
                return wrong
            if (wrong := stranger(section, self.job, name)) is not None:
                return wrong
            alone = beside_any_section(section, self.job.several)
            if alone is not None:
                return f"{name}: {alone}"
            for loop, expected in zip(self.loops, self.expected, strict=True):
                steps = link(sections, loop, self.job)
                if not meaning(steps).same(expected):
                    return "the loop computes something else"
                if (wrong := collision(steps)) is not None:
                    return wrong
        except HarmError as error:
            return str(error)
        return None


def removable(section: Section, several: bool = False) -> list[str]:
    """Names of the waits and events that nobody would miss: without one of them (an event with its waits and leaves) the
    section still runs safely after and before any other."""
    found, known = list[str](), dict[tuple[int, str], Step]()
    for each in section:
        if each.op not in ("wait", "record", "enter"):
            continue
        rest = [other for other in section if other is not each and each.name not in other.takes.get("event", ())]
        if beside_any_section(rest, several, known) is None:
            found.append(each.name)
    return found


def interleave(steps: Sequence[Step], expected: Sequence[tuple[Content, ...]], seed: str) -> str | None:
    """Runs the lanes beside each other once, in a random order. A step reads when it begins and again when it ends; what it
    writes is nobody's in between. What went wrong, or None."""
    rng = random.Random(seed)
    # Some lanes are up to a thousand times slower than others: a race needs a straggler.
    speed = {lane: 10 ** rng.uniform(-3, 0) for lane in LANES}
    queues = {lane: [n for n, s in enumerate(steps) if s.lane == lane] for lane in LANES}
    memory, fired, under_way = Memory(), set[Any](), dict[str, _UnderWay]()
    while any(queues.values()):
        ready = [lane for lane, queue in queues.items() if queue and (
            lane in under_way or steps[queue[0]].op != "wait" or steps[queue[0]].event in fired)]
        if not ready:
            return "lanes wait for ever"
        (lane,) = rng.choices(ready, [speed[lane] for lane in ready])
        number = queues[lane][0]
        step = steps[number]
        if step.event is not None:
            fired |= {step.event} if step.op == "record" else set()
            queues[lane].pop(0)
            continue
        begun = under_way.pop(lane, None)
        if begun is not None:
            if any(memory.get(place) is not begun for place in begun.made):
                return f"{step.name} is overwritten before it ends"
            memory.update(begun.found)
        if (wrong := _reads(step, memory, expected[number])) is not None:
            return wrong
        if begun is None:
            made = {step.writes[0]: _RELEASED} if step.op == "release" else effect(step, memory.look)
            under_way[lane] = _UnderWay(made, {place: memory[place] for place in made if place in memory})
            memory.update(dict.fromkeys(made, under_way[lane]))
        else:
            memory.update(begun.made)
            queues[lane].pop(0)
    return None


@dataclass(eq=False)
class _UnderWay:
    """A step that has begun and not ended: what it is going to write, and what was there before. In memory it stands for
    contents that are being written."""

    made: dict[str, Content]
    found: dict[str, Content]


def _reads(step: Step, memory: Memory, expected: tuple[Content, ...]) -> str | None:
    read: list[Content] = []

    def look(place: str) -> Content:
        read.append(memory.look(place))
        return read[-1]

    try:
        if step.op != "release":
            effect(step, look)
    except HarmError as error:
        return str(error)
    return None if tuple(read) == expected else f"{step.name} reads something else than in program order"
