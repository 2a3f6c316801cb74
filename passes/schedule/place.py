"""Assigns slots to values, releases values, and sizes the slots.

    w0 = prefetch("layers.0", into="W0")
    h1_0 = forward("decoder", "layers.0", mb=0, weights=(w0,))
    release(w0)                                            # from here on W0 is free
    w2 = prefetch("layers.2", into="W0")

A value lives from its node to its last use. The slot that has been free for longest is used first, so that a copy can run
beside a kernel. Boundary tiles, and each size class of a layer's tiles, have slots of their own (`Wb0` for the second
largest).
"""
from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from torch import fx

from megacompile.ir.placement import Updated
from megacompile.ir.places import Family, SlotName
from megacompile.ir.plan import SHARD_SLOTS, Plan
from megacompile.ir.program import (
    Builder,
    Program,
    Slot,
    argument,
    boundary_tiles,
    copy_section,
    differentiated,
    find,
    nodes,
    op_of,
    operands,
)

from .prefetch import layer_size_classes

name, requires, provides = "place", "shard", "place"


def run(program: Program, plan: Plan) -> Program:
    sections = {key: copy_section(graph) for key, graph in program.sections.items()}
    sizes: dict[SlotName, int] = {}
    stashes: dict[tuple[str, int], SlotName] = {}
    for graph in sections.values():
        _release(graph, plan)
        _Places(program, plan, sizes, stashes).assign(graph)
    slots = {str(slot): Slot(str(slot), sizes[slot]) for slot in sorted(sizes)}
    return program.evolve(stage=provides, sections=sections, slots=slots)


def _release(graph: fx.Graph, plan: Plan) -> None:
    """Releases every value after its last use, except values that later sections read, events, and values without memory.
    Gradients that are offloaded straight into the tile have no slot and need no release. Nor does what stays on the device."""
    build = Builder(graph, name)
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes(graph):
        for value in node.all_input_nodes:
            last[value] = node
    leased = {operands(n, "value")[0] for n in find(graph, "lease")}
    offloaded = {n for n in find(graph, "offload", "stash") if not n.users}
    for value in list(nodes(graph)):
        if op_of(value).result in (None, "event", "clip") or value in leased or value in offloaded:
            continue
        if _stays(value, plan):
            continue
        build.after(last.get(value, value), "release", value=value)


def _stays(value: fx.Node, plan: Plan) -> bool:
    """True if a value outlives its section, in its own slot. Gradients that an update on arrival consumes do not."""
    tile = argument(value, "tile")
    match op_of(value).result:
        case "weights":
            return plan.placement(tile).resident
        case "state" | "gradients" | "held":
            return True
        case "reduced":
            return plan.placement(tile).updated is Updated.ON_DEVICE and plan.update == "step"
    return False


#: Kinds of values that take turns in slots -> the family of their slots.
_FAMILIES = {"weights": Family.WEIGHTS, "reduced": Family.GRADIENTS, "staging": Family.WEIGHT_SLABS,
             "packed_shard": Family.WEIGHT_SLABS, "shard": Family.WEIGHT_SHARDS, "slab": Family.GRADIENT_SLABS,
             "stashed": Family.HOST_CHECKPOINTS, "checkpoint": Family.FETCHED_CHECKPOINTS,
             "moments": Family.STATE_SLABS}
#: Kinds of values of tiles that are updated on the device -> the family of their slots.
_UPDATED_THERE = {"weights": Family.UPDATED_WEIGHTS, "state": Family.UPDATED_STATE, "gradients": Family.UPDATED_GRADIENTS,
                  "reduced": Family.UPDATED_GRADIENTS}

#: Kinds of values of tiles that visit the device. Tiles do so one after the other, boundary tiles too: their chunks are no
#: larger.
_VISITING = {"visiting": Family.VISITING, "momentum": Family.MOMENTUM}


class _Places:
    """Assigns slots in one section. State: for each group of slots that take turns (named by its first slot), the number of
    slots made, and the free slots in the order in which they became free; the slot of each value; and `stashes`, the slots in
    which an earlier section left checkpoints, by call and micro-batch."""

    def __init__(self, program: Program, plan: Plan, sizes: dict[SlotName, int],
                 stashes: dict[tuple[str, int], SlotName]) -> None:
        self.program, self.plan, self.sizes, self.stashes = program, plan, sizes, stashes
        self.boundary, self.size_classes = boundary_tiles(program.calls), layer_size_classes(program)
        self.free: dict[SlotName, list[SlotName]] = defaultdict(list)
        self.made: dict[SlotName, int] = defaultdict(int)
        self.slot_of: dict[fx.Node, SlotName] = {}
        self.counts = {
            Family.WEIGHTS: plan.weight_slots, Family.GRADIENTS: plan.gradient_slots, Family.WEIGHT_SLABS: plan.staging_slabs,
            Family.GRADIENT_SLABS: plan.gradient_slabs, Family.WEIGHT_SHARDS: SHARD_SLOTS,
            Family.FETCHED_CHECKPOINTS: plan.checkpoint_slots, Family.STATE_SLABS: plan.state_slabs,
            Family.HOST_CHECKPOINTS: len(plan.from_host(differentiated(program))) * len(plan.wave(0))}
        only_weights = [tile for tile in plan.resident if plan.placement(tile).updated is not Updated.ON_DEVICE]
        self.numbers = {tile: number for tiles in (plan.resident_state, only_weights) for number, tile in enumerate(tiles)}

    def assign(self, graph: fx.Graph) -> None:
        for node in list(nodes(graph)):
            op = op_of(node)
            if op.name == "release":
                (value,) = operands(node, "value")
                if (slot := self.slot_of.get(value)) is not None:
                    self.free[replace(slot, number=0)].append(slot)
            elif op.name == "offload" and not node.users:
                continue  # goes straight into the tile
            elif "into" in op.parameters:
                self._put(node, self._choose(node))

    def _choose(self, node: fx.Node) -> SlotName:
        tile, kind = argument(node, "tile"), op_of(node).result
        if _stays(node, self.plan):
            if kind == "held":
                return SlotName(Family.HELD, number=self.plan.held_state.index(tile))
            updated_there = self.plan.placement(tile).updated is Updated.ON_DEVICE
            return SlotName(_UPDATED_THERE[kind or ""] if updated_there else Family.RESIDENT, number=self.numbers[tile])
        if kind in _VISITING:
            return self._take(SlotName(_VISITING[kind]), 1)
        if op_of(node).name == "stashed":
            return self.stashes[argument(node, "call"), argument(node, "mb")]
        family = _FAMILIES[kind or ""]
        if tile not in self.boundary:
            return self._take(SlotName(family, size_class=self.size_classes.get(tile, 0)), self.counts[family])
        return self._take_in_size_order(node) if kind == "weights" else self._take(SlotName(family, boundary=True), 1)

    def _take(self, first: SlotName, count: int) -> SlotName:
        """A slot from the group of `first`: an unused one, or else the one that has been free for longest."""
        if self.made[first] < count:
            self.made[first] += 1
            return replace(first, number=self.made[first] - 1)
        assert self.free[first], f"no free slot beside {first}: {count} are planned"
        return self.free[first].pop(0)

    def _take_in_size_order(self, node: fx.Node) -> SlotName:
        """A slot for a tile of a boundary call, whose tiles are on the device together. The largest tile of each call uses WB0,
        the next largest WB1. `prefetch` holds the tiles of one call at a time, so the slot is free."""
        call = next(argument(user, "call") for user in node.users if argument(user, "call"))
        tiles = [t for t in self.program.call(call).tiles if t in self.boundary and not self.plan.placement(t).resident]
        tiles.sort(key=lambda t: -self.program.tiles[t].weight_bytes)
        return SlotName(Family.WEIGHTS, boundary=True, number=tiles.index(argument(node, "tile")))

    def _put(self, node: fx.Node, slot: SlotName) -> None:
        node.kwargs = {**node.kwargs, "into": str(slot)}
        self.slot_of[node] = slot
        self.sizes[slot] = max(self.sizes.get(slot, 0), self.program.value_bytes(node))
        if op_of(node).name == "stash":
            self.stashes[argument(node, "call"), argument(node, "mb")] = slot
