"""What is done to programs, one edit at a time, each of one section. Nothing is edited until `Edit.apply`."""
from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

from torch import fx

from megacompile.ir.printing import describe
from megacompile.ir.program import Builder, Program, Slot, argument, copy_section, nodes, op_of, operands, slot_family

SYNCHRONIZING = ("wait", "record", "enter", "leave")
DROPPED = ("update", "update_weights", "update_moments", "update_on_device", "update_visiting", "offload_weights",
           "offload_norms", "stash", "fetch", "offload", "accumulate", "clip",
           "add_to_sum", "norms_of_sum", "update_from_sum",
           "fetch_gradients", "fetch_state", "store_state", "scale", "read_state", "write_state",
           "fetch_held", "update_held", "return_weights", "return_state")
UPDATES = ("read_state", "write_state", "update", "update_weights", "update_moments", "update_on_device",
           "update_from_sum", "update_visiting", "offload_weights", "fetch_held", "update_held", "return_weights",
           "return_state")
#: What several ranks do together, or tell each other.
EXCHANGES = ("gather", "reduce_scatter", "all_reduce", "share_norms", "share_host_norms", "gather_resident", "gather_momentum",
             "share_loss", "announce")
#: What stands for a copy that was dropped: the parameter that it copied.
_SOURCES = {"stash": "value", "fetch": "stashed"}


@dataclass(frozen=True)
class Edit:
    kind: str
    section: str
    what: str
    change: Callable[[list[fx.Node]], None]
    declares: Slot | None = None

    def apply(self, program: Program) -> Program:
        graph = copy_section(program.section(self.section))
        self.change(list(nodes(graph)))
        declared = {self.declares.name: self.declares} if self.declares else {}
        return program.evolve(sections={**program.sections, self.section: graph}, slots={**program.slots, **declared})


def single(program: Program) -> Iterator[Edit]:
    """Every edit of one node or of one pair of slots."""
    for section, graph in program.sections.items():
        listed = list(nodes(graph))
        for at, node in enumerate(listed):
            op, what = op_of(node).name, describe(node)
            if op == "wait":
                what = f"{what} for {describe(operands(node, 'event')[0])}"
            if op in SYNCHRONIZING:
                yield Edit(f"{op} removed", section, what, _removed(at))
            elif op == "release":
                yield Edit("release removed", section, what, _removed(at))
                yield from (Edit("release moved", section, f"{what} by {by}", _moved(at, by)) for by in (-12, -3, 3, 12)
                            if 0 <= at + by < len(listed))
            elif op in DROPPED or (
                    op in ("prefetch", "pack", "prefetch_shard", "pack_shard") and not _computes(node)):
                yield Edit("op dropped", section, what, _dropped(at))
            if op == "wait":
                after = next((i for i in range(at + 1, len(listed)) if op_of(listed[i]).lane == argument(node, "lane")), None)
                if after is not None:
                    yield Edit("wait moved", section, what, _moved(at, after - at))
            if op in UPDATES:
                yield from (Edit("update moved", section, f"{what} by {by}", _moved(at, by)) for by in (-12, -3, 3, 12)
                            if 0 <= at + by < len(listed))
            if op in (*UPDATES, "accumulate", "add_to_sum", "norms_of_sum", "offload"):
                yield Edit("op repeated", section, what, _repeated(at))
            if op in EXCHANGES:
                yield from _exchange(section, listed, at)
        yield from _slots(program, section, listed)


def double(program: Program, rng: random.Random, count: int) -> Iterator[Edit]:
    """So many pairs of waits, events and leaves, both of which are removed."""
    for _ in range(count):
        section = rng.choice([s for s, graph in program.sections.items()
                              if sum(op_of(n).name in SYNCHRONIZING for n in nodes(graph)) > 1] or [""])
        if section:
            listed = list(nodes(program.section(section)))
            one, other = sorted(rng.sample([i for i, n in enumerate(listed) if op_of(n).name in SYNCHRONIZING], 2))
            yield Edit("two removed", section, f"{describe(listed[one])}, {describe(listed[other])}", _removed(one, other))


def _exchange(section: str, listed: list[fx.Node], at: int) -> Iterator[Edit]:
    """Every edit of what ranks exchange."""
    node = listed[at]
    op, what = op_of(node).name, describe(node)
    if op != "gather" or not _computes(node):
        yield Edit("exchange dropped", section, what, _dropped(at))
    yield Edit("exchange repeated", section, what, _repeated(at))
    yield from (Edit("exchange moved", section, f"{what} by {by}", _moved(at, by)) for by in (-12, -3, -1, 1, 3, 12)
                if 0 <= at + by < len(listed))
    following = next((i for i in range(at + 1, len(listed)) if op_of(listed[i]).lane == op_of(node).lane), None)
    if following is not None:
        yield Edit("exchanges swapped", section, f"{what}, {describe(listed[following])}", _moved(at, following - at))
    if op == "gather":
        yield Edit("whole tile copied", section, what, _copied_whole(at))


def _computes(node: fx.Node) -> bool:
    """Whether a kernel takes the value: without it the program cannot be."""
    users = [user for user in node.users if op_of(user).result != "event"]
    return any(argument(user, "template") is not None or _computes(user) for user in users)


def _slots(program: Program, section: str, listed: list[fx.Node]) -> Iterator[Edit]:
    families: dict[str, list[int]] = {}
    for at, node in enumerate(listed):
        slot = argument(node, "into")
        if slot is not None:
            families.setdefault(slot_family(slot), []).append(at)
            yield from (Edit("another slot", section, f"{node.name} {slot} -> {other}", _put({at: other}))
                        for other in program.slots if other != slot and slot_family(other) == slot_family(slot))
            new = Slot(f"{slot}9", program.slots[slot].bytes)
            yield Edit("new slot", section, f"{node.name} {slot} -> {new.name}", _put({at: new.name}), new)
    for members in families.values():
        for one, other in combinations(members, 2):
            slots = argument(listed[one], "into"), argument(listed[other], "into")
            if slots[0] != slots[1]:
                yield Edit("slots swapped", section, f"{listed[one].name} {slots[0]}, {listed[other].name} {slots[1]}",
                           _put({one: slots[1], other: slots[0]}))


# What edits do to the list of a section's nodes

def _removed(*numbers: int) -> Callable[[list[fx.Node]], None]:
    def change(listed: list[fx.Node]) -> None:
        for number in reversed(numbers):
            if listed[number].graph is not None and not listed[number]._erased:
                _erase(listed[number])
    return change


def _erase(node: fx.Node) -> None:
    """With everything that uses it: an event's waits and leaves."""
    for user in list(node.users):
        _erase(user)
    node.graph.erase_node(node)


def _dropped(number: int) -> Callable[[list[fx.Node]], None]:
    """The op goes with its events; who used what it made takes what it was made of, or goes too."""
    def change(listed: list[fx.Node]) -> None:
        node = listed[number]
        source = operands(node, _SOURCES.get(op_of(node).name, ""))
        for user in list(node.users):
            if op_of(user).name in ("record", "release"):
                _erase(user)
            elif source:
                user.replace_input_with(node, source[0])
            elif argument(user, "clip") is not None:
                user.kwargs = {k: v for k, v in user.kwargs.items() if k != "clip"}
        _erase(node)
    return change


def _moved(number: int, by: int) -> Callable[[list[fx.Node]], None]:
    def change(listed: list[fx.Node]) -> None:
        node, target = listed[number], listed[number + by]
        (target.append if by > 0 else target.prepend)(node)
    return change


def _put(slots: dict[int, str]) -> Callable[[list[fx.Node]], None]:
    def change(listed: list[fx.Node]) -> None:
        for number, slot in slots.items():
            listed[number].kwargs = {**listed[number].kwargs, "into": slot}
    return change


def _repeated(number: int) -> Callable[[list[fx.Node]], None]:
    def change(listed: list[fx.Node]) -> None:
        node = listed[number]
        Builder(node.graph).after(node, op_of(node).name, **node.kwargs)
    return change


def _copied_whole(number: int) -> Callable[[list[fx.Node]], None]:
    """A copy of all shards from the host stands for their exchange."""
    def change(listed: list[fx.Node]) -> None:
        node = listed[number]
        (shard,) = operands(node, "shard")
        for user in list(node.users):
            if op_of(user).name in ("record", "release"):
                _erase(user)
        copied = Builder(node.graph).after(shard, "prefetch", tile=argument(node, "tile"), into=argument(node, "into"))
        node.replace_all_uses_with(copied)
        Builder(node.graph).after(copied, "release", value=copied)
        _erase(node)
    return change
