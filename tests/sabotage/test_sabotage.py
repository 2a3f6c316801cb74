"""The verifier is tested by breaking programs: every edit of a kind, one at a time, on schedules of the real pipeline.

An edit must be refused. Where one is not, the oracle must find no interleaving in which it does harm, in any of the
sequences of sections below; how many there were is printed (`pytest -s`) and bounded.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import oracle
import pytest
from torch import fx

from megacompile.errors import ProgramError
from megacompile.listing import describe
from megacompile.program import (
    Builder,
    Program,
    argument,
    copy_section,
    find,
    nodes,
    op_of,
    operands,
    reached,
    slot_family,
)
from megacompile.verify import verify

GOLDENS: dict[str, dict[str, Any]] = {
    "streamed": {},
    "blocks of two, three micro-batches": {"micro_batches": (2, 1, 1), "checkpoint_interval": 2, "weight_slots": 3},
    "one block, slab pool": {"checkpoint_interval": 4, "weight_slots": 4, "locked": False, "gradient_slabs": 2},
    "resident, three micro-batches": {"micro_batches": (1, 1, 1), "resident": ("layers.1", "epilogue")},
    "updated on the device": {"resident": ("prologue", "layers.0"), "resident_state": ("prologue", "layers.0")},
    "updates on arrival": {"update": "arrival", "micro_batches": (1, 1), "resident": ("prologue", "layers.0"),
                           "resident_state": ("layers.0",)},
    "checkpoints on the host, two micro-batches": {"micro_batches": (2, 1), "host_checkpoints": 3},
    "tied, residuals kept, a frozen layer": {"tied": True, "saved_layers": 2, "frozen": ("layers.0",)},
}


#: Sections that run while lanes are at rest.
RESTING = ("load", "store", "rescue")
UPDATES = ("adam", "adam_resident")


@pytest.fixture(params=GOLDENS)
def golden(request: pytest.FixtureRequest, make_schedule: Callable[..., Any]) -> Program:
    program = make_schedule(**GOLDENS[request.param]).program
    assert reached(program, "synchronize")
    return program


def sequences(program: Program) -> Iterator[tuple[str, ...]]:
    """Every ordered pair of sections, and steps as loops order them."""
    first = ("load",) if "load" in program.sections else ()
    names = [name for name in program.sections if name not in RESTING]
    yield from ((*first, a, b) for a in names for b in names)
    for steps in (("forward", "backward", "update", "forward", "backward_accumulate", "update", "evaluate", "forward"),
                  ("forward", "forward", "backward", "backward_accumulate", "update", "update", *first, "forward"),
                  ("forward", "backward", "evaluate", "forward", "backward")):
        yield (*first, *(name for name in steps if name in program.sections))


def race(program: Program, original: Program, interleavings: int) -> str | None:
    for names in sequences(program):
        expected = oracle.meaning([original.section(name) for name in names])
        found = oracle.find_race([program.section(name) for name in names], expected, interleavings)
        if found is not None:
            return f"{' '.join(names)}: {found}"
    return None


# Edits: each yields (what was done, the edited program)

Edits = Iterator[tuple[str, Program]]


def edited(program: Program, section: str, edit: Callable[[list[fx.Node]], None]) -> Program:
    graph = copy_section(program.section(section))
    edit(list(nodes(graph)))
    return program.evolve(sections={**program.sections, section: graph})


def without(program: Program, *ops: str) -> Edits:
    """Each node of these ops is removed, with everything that uses it (an event's waits and leaves)."""
    for section, graph in program.sections.items():
        for number, node in enumerate(nodes(graph)):
            if op_of(node).name in ops and not str(argument_place(node)).startswith("R"):
                def remove(listed: list[fx.Node], number: int = number) -> None:
                    erase(listed[number])
                event = operands(node, "event")
                why = f" for {describe(event[0])}" if event else ""
                yield f"{section}: {describe(node)}{why}", edited(program, section, remove)


def erase(node: fx.Node) -> None:
    for user in list(node.users):
        erase(user)
    node.graph.erase_node(node)


def argument_place(node: fx.Node) -> Any:
    """The slot of a released value: the release of a resident copy says nothing, its slot is never given to another."""
    return argument(operands(node, "value")[0], "into") if op_of(node).name == "release" else None


def with_other_slots(program: Program) -> Edits:
    for section, graph in program.sections.items():
        for number, node in enumerate(nodes(graph)):
            slot = argument(node, "into")
            for other in program.slots if slot is not None else ():
                if other != slot and slot_family(other) == slot_family(slot):
                    def put(listed: list[fx.Node], number: int = number, other: str = other) -> None:
                        listed[number].kwargs = {**listed[number].kwargs, "into": other}
                    yield f"{section}: {node.name} {slot} -> {other}", edited(program, section, put)


def with_updates_twice(program: Program) -> Edits:
    section = "update" if "update" in program.sections else "backward"
    for number, node in enumerate(nodes(program.section(section))):
        if op_of(node).name in UPDATES:
            def double(listed: list[fx.Node], number: int = number) -> None:
                node = listed[number]
                Builder(node.graph).after(node, op_of(node).name, **node.kwargs)
            yield f"{op_of(node).name} {argument(node, 'tile')} twice", edited(program, section, double)


def refused(edits: Edits, original: Program) -> tuple[int, list[str]]:
    """How many edits the verifier refused, and those that it accepted, all of which the oracle finds harmless."""
    count, accepted = 0, []
    for what, program in edits:
        try:
            verify(program)
        except ProgramError:
            count += 1
        else:
            harm = race(program, original, interleavings=4)
            assert harm is None, f"the verifier accepts {what}, but {harm}"
            accepted.append(what)
    return count, accepted


def test_goldens_run_as_in_program_order_under_random_interleavings(golden: Program) -> None:
    assert race(golden, golden, interleavings=12) is None
    steps = ["load", "forward", "backward", "update", "forward"]
    sections = [golden.section(name) for name in steps if name in golden.sections]
    assert oracle.find_race(sections, oracle.meaning(sections), interleavings=200) is None


@pytest.mark.parametrize("names", [("streamed", "blocks of two, three micro-batches"),
                                   ("updates on arrival", "updated on the device"),
                                   ("updates on arrival", "one block, slab pool")])
def test_programs_of_two_shapes_share_memory_without_races(names: tuple[str, str], make_schedule: Callable[..., Any]) -> None:
    one, other = (make_schedule(**GOLDENS[name]).program for name in names)
    verify(one, [other])
    for a in one.sections.values():
        for b in other.sections.values():
            for sections in ([a, b], [b, a]):
                assert oracle.find_race(sections, oracle.meaning(sections), interleavings=10) is None


def test_every_removed_wait_is_caught_or_harmless(golden: Program) -> None:
    """Accepted are only waits for the past of a lane of whose present the waiting lane has waited already."""
    count, accepted = refused(without(golden, "wait"), golden)
    print(f"{count} removed waits refused, {len(accepted)} superfluous")
    assert count > 50
    assert len(accepted) <= count // 8, accepted
    assert all("for enter" in what for what in accepted)


def test_every_removed_event_is_caught_or_harmless(golden: Program) -> None:
    count, accepted = refused(without(golden, "record", "enter"), golden)
    print(f"{count} removed events refused, {len(accepted)} superfluous")
    assert count > 50
    assert len(accepted) <= count // 8, accepted
    assert all(": enter" in what for what in accepted)


def test_every_removed_leave_release_and_update_is_caught(golden: Program) -> None:
    count, accepted = refused(without(golden, "leave", "release", *UPDATES, "offload_weights"), golden)
    print(f"{count} removed leaves, releases and updates refused")
    assert count > 50
    assert not accepted


def test_every_repeated_update_is_caught(golden: Program) -> None:
    count, accepted = refused(with_updates_twice(golden), golden)
    assert count == len([node for graph in golden.sections.values() for node in find(graph, *UPDATES)])
    assert not accepted


def test_every_value_in_another_slot_is_caught_or_harmless(golden: Program) -> None:
    count, accepted = refused(with_other_slots(golden), golden)
    print(f"{count} values in another slot refused, {len(accepted)} harmless")
    assert count > 10


def test_the_oracle_sees_every_removed_wait_for_an_event_of_its_section(make_schedule: Callable[..., Any]) -> None:
    """The oracle is no rubber stamp: without clocks it finds the races that the verifier finds. (Of the waits for
    earlier sections some are superfluous in these sequences, though not in all that the contract allows.)"""
    golden = make_schedule(**GOLDENS["streamed"]).program
    edits = [(what, program) for what, program in without(golden, "wait") if "for record" in what]
    assert len(edits) > 20
    for what, program in edits:
        assert race(program, golden, interleavings=30) is not None, what
