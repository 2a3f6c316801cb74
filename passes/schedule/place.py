"""Names slots, ends lives, and states how large each slot must be.

    w0 = prefetch("layers.0", into="W0")
    h1_0 = forward("decoder", "layers.0", mb=0, weights=(w0,))
    release(w0)                                            # from here on W0 is free
    w2 = prefetch("layers.2", into="W0")

A value lives from its node to its last use. Slots are given out in turn, the one that has been free for longest first: two
values that follow each other then sit in different slots, which is what lets a copy run beside a kernel. Border tiles
(the largest) have slots of their own, so that a slot of a layer is no larger than a layer.
"""
from __future__ import annotations

from collections import defaultdict

from torch import fx

from megacompile.plan import Plan
from megacompile.program import Builder, Program, Slot, argument, copy_section, find, nodes, op_of, operands

from .prefetch import border_tiles

name, requires, provides = "place", "optimizer", "place"


def run(program: Program, plan: Plan) -> Program:
    sections = {key: copy_section(graph) for key, graph in program.sections.items()}
    sizes: dict[str, int] = {}
    for graph in sections.values():
        _release(graph, plan)
        _Places(program, plan, sizes).assign(graph)
    order = sorted(sizes, key=lambda slot: (slot.rstrip("0123456789"), int(slot.lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))))
    return program.evolve(stage=provides, sections=sections, slots={slot: Slot(slot, sizes[slot]) for slot in order})


def _release(graph: fx.Graph, plan: Plan) -> None:
    """After its last use every value is released, but what a lease keeps, events, and values that are no memory.

    A slab that was written for the host's gradients is no slot and needs no end; a resident tile has none."""
    build = Builder(graph, name)
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes(graph):
        for value in node.all_input_nodes:
            last[value] = node
    leased = {operands(n, "value")[0] for n in find(graph, "lease")}
    offloaded = {n for n in find(graph, "offload") if not n.users}
    for value in list(nodes(graph)):
        if op_of(value).result in (None, "event", "clip") or value in leased or value in offloaded:
            continue
        if op_of(value).result == "weights" and argument(value, "tile") in plan.resident:
            continue
        build.after(last.get(value, value), "release", value=value)


class _Places:
    """Hands out slots in one section. State: free slots of each family in the order in which they became free."""

    def __init__(self, program: Program, plan: Plan, sizes: dict[str, int]) -> None:
        self.program, self.plan, self.sizes = program, plan, sizes
        self.border = border_tiles(program)
        self.resident = {tile: f"R{i}" for i, tile in enumerate(plan.resident)}
        self.free: dict[str, list[str]] = defaultdict(list)
        self.made: dict[str, int] = defaultdict(int)
        self.counts = {"W": plan.weight_slots, "G": plan.gradient_slots, "S": plan.staging_slabs, "D": plan.gradient_slabs}

    def assign(self, graph: fx.Graph) -> None:
        for node in list(nodes(graph)):
            op = op_of(node)
            if op.name == "release":
                (value,) = operands(node, "value")
                place = argument(value, "into")
                if place is not None and place not in self.resident.values():
                    self.free[self._family(place)].append(place)
            elif op.name == "resident":
                self._put(node, self.resident[argument(node, "tile")])
            elif op.name == "offload" and not node.users:
                continue  # straight into the tile
            elif "into" in op.parameters:
                tile = argument(node, "tile")
                if op.result == "weights" and tile in self.resident:
                    self._put(node, self.resident[tile])
                else:
                    letter = {"weights": "W", "reduced": "G", "staging": "S", "slab": "D"}[op.result or ""]
                    self._put(node, self._take(letter, tile in self.border))

    def _family(self, slot: str) -> str:
        return slot.rstrip("0123456789")

    def _take(self, letter: str, border: bool) -> str:
        """A slot that is free, preferring one that was never used: turns are as long as the plan's count of slots."""
        family = letter + ("B" if border else "")
        if self.made[family] < self.counts[letter] and not (border and self.free[family]):
            self.made[family] += 1
            return f"{family}{self.made[family] - 1}"
        assert self.free[family], f"no free slot of {family}: {self.counts[letter]} are planned"
        return self.free[family].pop(0)

    def _put(self, node: fx.Node, slot: str) -> None:
        tile = self.program.tiles[argument(node, "tile")]
        size = tile.weight_bytes if op_of(node).result in ("weights", "staging") else tile.gradient_bytes
        node.kwargs = {**node.kwargs, "into": slot}
        self.sizes[slot] = max(self.sizes.get(slot, 0), size)
