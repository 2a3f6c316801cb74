"""Verifies a program after every pass.

Each rule is a generator of faults, with the stage from which it must hold. `RULES` lists them in order: a later rule may rely
on the earlier ones. The first fault is raised, with an excerpt of the program. The rules:

    well_formed     ops, arguments and kinds of values; nothing is used before it is defined or after its release
    trained         forward and backward visit every call in order, with the values of the right call and micro-batch
    belongs         each op is in a section where it has a meaning
    returned        the caller gets each micro-batch's result, once and in order
    added_up        each tile's gradients are added up in one value, and scaled by the gradient of the caller's loss
    supplied        each compute node has the weights of its call's tiles
    sent_home       each trainable tile's gradients are reduced and offloaded once, after the last contribution
    summed          each wave is added once to a tile's sum on the host, before the update that reads the sum
    updated         each trainable tile is updated once, after the clip; resident copies are refreshed
    on_disk         moments on disk are read into a slab before their update, and written from it afterwards
    one_version     nothing runs on weights that the same section has updated
    together        several ranks exchange shards, gradients, norms and losses once, and before they are read
    placed          slots fit their values, no live value is overwritten, every value is released or leased
    ordered         every hazard between lanes is ordered, within a section and against any section before it
    handed_on       each section passes later ones events that cover its last accesses
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tabulate import tabulate
from torch import fx

from megacompile.errors import LONGEST_MESSAGE, ProgramError, shortened
from megacompile.ir.printing import describe
from megacompile.ir.program import (
    TILE_PARTS,
    Access,
    Lane,
    Program,
    accesses,
    argument,
    find,
    lane_of,
    lanes_against,
    lanes_that,
    nodes,
    operands,
    place_kind,
    reached,
)
from megacompile.verify.completeness import sent_home, supplied, trained
from megacompile.verify.fault import Fault
from megacompile.verify.ordering import Clocks, Hazard, kept_slots, placed
from megacompile.verify.ranks import together
from megacompile.verify.updates import on_disk, summed, updated
from megacompile.verify.wellformed import added_up, belongs, one_version, returned, well_formed

Rule = Callable[[Program], Iterator[Fault]]


def verify(program: Program, others: Iterable[Program] = ()) -> None:
    """Raises ProgramError, or HazardError if accesses to a place collide, at the first rule that does not hold. `others`:
    programs of other batch shapes that run before or after this one on the same memory, each already verified. They must agree
    on tiles."""
    for rule, stage in RULES:
        if reached(program, stage):
            for fault in rule(program):
                raise fault.error(program)
    check_agreement(program, others)


def check_agreement(program: Program, others: Iterable[Program]) -> None:
    """Raises ProgramError if a program disagrees with `others` that run on the same memory (each verified alone)."""
    for other in others:
        for fault in _agree(program, other):
            raise fault.error(program)


@dataclass(frozen=True)
class Verdict:
    """`holds`: whether a rule holds for a program; None: it was not checked. `why`: the fault, or the reason why it was not
    checked."""

    rule: str
    holds: bool | None
    why: str = ""


def judge(program: Program) -> tuple[list[Verdict], ProgramError | None]:
    """Each rule's verdict, in order, and the first fault as an error. Rules after a broken one are not checked."""
    verdicts: list[Verdict] = []
    error: ProgramError | None = None
    for rule, stage in RULES:
        if error is not None:
            verdicts.append(Verdict(rule.__name__, None, "relies on the rules above"))
        elif not reached(program, stage):
            verdicts.append(Verdict(rule.__name__, None, f"holds from stage {stage}"))
        else:
            fault = next(rule(program), None)
            error = None if fault is None else fault.error(program)
            why = "" if fault is None else shortened(fault.message, LONGEST_MESSAGE)
            verdicts.append(Verdict(rule.__name__, fault is None, why))
    return verdicts, error


def _agree(program: Program, other: Program) -> Iterator[Fault]:
    for name, tile in program.tiles.items():
        if name in other.tiles and other.tiles[name] != tile:
            yield Fault(f"tile {name} is {tile}, but {other.tiles[name]} in a program of another shape",
                        "make both programs from the same tiles")
    ours, theirs = kept_slots(program), kept_slots(other)
    if sorted(ours.values()) == sorted(theirs.values()):  # else `load` runs between the two
        for slot, kept in ours.items():
            if theirs.get(slot, kept) != kept:
                yield Fault(f"slot {slot} keeps tile {kept}, but {theirs[slot]} in a program of another shape",
                            f"give {kept} the slot that it has there")


def ordered(program: Program) -> Iterator[Fault]:
    """Every cross-lane read-after-write, write-after-read and write-after-write on a place is ordered, within each section and
    against the worst that may have run before it."""
    for graph in program.sections.values():
        clocks = Clocks(program.processes > 1)
        for node in nodes(graph):
            for hazard in clocks.hazards(node):
                yield _collision(hazard)
            clocks.step(node)


def _collision(hazard: Hazard) -> Fault:
    place, node, lane = hazard.place, hazard.node, lane_of(hazard.node)
    family = place_kind(place)
    kind = "value" if family is None else "tile part" if family in TILE_PARTS else "slot"
    write = (place, Access.WRITE) in accesses(node)
    done = "overwritten" if write else "read"
    if hazard.earlier is None:
        other = f"{hazard.lane} may still {hazard.access} it from an earlier section"
        before = f"{hazard.lane} in the sections before"
        remedy = f'let {lane} wait for enter("{place}", "{hazard.access}", "{hazard.lane}") before it'
    else:
        other = f"{describe(hazard.earlier)} may still {hazard.access} it"
        before = describe(hazard.earlier)
        remedy = f"let {lane} wait for an event recorded on {hazard.lane} after {hazard.earlier.name}"
    message = f"{kind} {place} is {done} by {describe(node)} while {other}"
    order = f"{'write' if write else 'read'} of {place} by {describe(node)} is not ordered after {hazard.access} by {before}"
    return Fault(message, remedy, node, hazard.earlier, hazard=True, order=order)


def handed_on(program: Program) -> Iterator[Fault]:
    """For each place that other sections know, and each lane that accessed it, there is one `leave` of an event at or after
    its last access. It says "write" if the lane wrote the place, else "read". None is needed where every other lane that may
    conflict comes after it anyway, or must wait for a later access that is handed on."""
    for name, graph in program.sections.items():
        clocks = Clocks(program.processes > 1)
        for node in nodes(graph):
            clocks.step(node)
        several_ranks = program.processes > 1
        owed = clocks.last()
        left: list[tuple[str, Lane, Access, fx.Node]] = []
        for leave in find(graph, "leave"):
            place, (event,) = argument(leave, "place"), operands(leave, "event")
            lane = lane_of(event)
            assert lane is not None, "an event of the past, which `well_formed` refuses"
            here = owed.pop((place, lane), None)
            if here is None:
                yield Fault(f"{describe(leave)} passes an event of {lane} to later sections, but {lane} does not access "
                            f"{place} in {name} (or an earlier leave passed its event)", "drop this leave", leave)
                continue
            access = Access.WRITE if Access.WRITE in here else Access.READ
            if argument(leave, "access") != access:
                yield Fault(f"{describe(leave)} is wrong: {lane} does {access} the place in {name}",
                            f'say "{access}"', leave, here[access], hazard=True)
            left += [(place, lane, access, node) for node in here.values()]
            late = next((node for node in here.values() if not clocks.covers(event, node)), None)
            if late is not None:
                yield Fault(f"{describe(leave)} passes {event.name} to later sections, and {event.name} fires before "
                            f"{describe(late)} is done",
                            f"record an event on {lane} after {late.name} and pass that one", leave, late, hazard=True,
                            order=f"{describe(leave)} is not ordered after {access} by {describe(late)}")
        for (place, lane), here in owed.items():
            kind = place_kind(place)
            assert kind is not None, "a place that no other section knows is not handed on"
            if all(clocks.known_to(node, {other}) or any(
                    where == place and by != other and clocks.covers(last, node) and
                    (how == Access.WRITE or access == Access.READ or other not in lanes_that(Access.READ, kind, several_ranks))
                    for where, by, how, last in left)
                    for access, node in here.items() for other in lanes_against(access, kind, several_ranks) - {lane}):
                continue
            node = next(iter(here.values()))
            yield Fault(f"{place} is accessed by {describe(node)}, but no leave passes an event of {lane} to later "
                        "sections, which could not wait for it", f"record an event on {lane} after it and leave it", node,
                        hazard=True)


#: Every rule and the stage from which it holds.
RULES: tuple[tuple[Rule, str], ...] = (
    (well_formed, "model"),
    (trained, "differentiate"),
    (belongs, "differentiate"),
    (returned, "differentiate"),
    (added_up, "differentiate"),
    (supplied, "prefetch"),
    (sent_home, "offload"),
    (summed, "offload"),
    (updated, "optimizer"),
    (on_disk, "optimizer"),
    (one_version, "optimizer"),
    (together, "shard"),
    (placed, "place"),
    (ordered, "synchronize"),
    (handed_on, "synchronize"),
)


def rule_table() -> str:
    """The rules as Markdown, from their docstrings."""
    rows = [[f"`{rule.__name__}`", stage, " ".join((rule.__doc__ or "").split())] for rule, stage in RULES]
    return str(tabulate(rows, ["rule", "from stage", "what it says"], tablefmt="github"))
