"""Inserts copies to the device, in the order of first use and as early as slots allow: weights of tiles that are not resident,
and checkpoints in host memory.

    w0 = prefetch("layers.0")                              # slots are free: before anything else
    w1 = prefetch("layers.1")
    h1_0 = forward("decoder", "layers.0", mb=0, weights=(w0,))
    w2 = prefetch("layers.2")                              # the last use of layers.0 is over: its slot is free
    h2_0 = forward("decoder", "layers.1", mb=0, weights=(w1,))

A *stay* is one arrival of a tile with all its uses: those of one call in a forward, those of one block in a backward. Layers
share `plan.weight_slots` slots of each size class. Boundary tiles are held for one call at a time. A tile that several calls
read stays until another tile of its size class is needed.

    h5_0 = forward("native", "layers.2", mb=0, weights=(w5,))          # up to the router
    w6 = prefetch_routed("layers.2.experts", router=h5_0)              # of this tile the experts that it has chosen
    h6_0 = forward("native", "layers.2.mlp.experts", mb=0, weights=(w5, w6), inputs=(h5_0, s))

Such a tile (with `routed_bytes`) arrives right before its use.

    c4_1 = fetch("layers.3", mb=1, stashed=x4_1)           # while micro-batch 0 is computed
    g5_0 = recompute_backward("decoder", "layers.4", mb=0, inputs=(c4_0, s_0), ...)

Checkpoints take turns in `plan.checkpoint_slots` slots.
"""
from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from megacompile.errors import MegacompileError
from megacompile.ir.plan import Plan
from megacompile.ir.program import (
    Builder,
    Program,
    argument,
    boundary_tiles,
    copy_section,
    differentiated,
    nodes,
    op_of,
    operands,
    size_classes,
)

name, requires, provides = "prefetch", "differentiate", "prefetch"


@dataclass
class _Stay:
    tile: str
    group: int
    boundary: bool
    uses: list[fx.Node] = field(default_factory=list)
    weights: fx.Node | None = None


@dataclass
class _Return:
    """A checkpoint that is fetched from the host, and all its uses. `after`: the loss that its backward begins with; None if
    the backward is a separate section."""

    stashed: fx.Node
    after: fx.Node | None
    uses: list[fx.Node] = field(default_factory=list)


def run(program: Program, plan: Plan) -> Program:
    return program.evolve(stage=provides, sections={
        key: _insert(program, plan, copy_section(graph))
        for key, graph in program.sections.items()})


def layer_size_classes(program: Program) -> dict[str, int]:
    """The size class of each tile of a layer. Tiles of one size class take turns in slots."""
    return size_classes([call.tiles for call in program.calls if call.role == "layer"], boundary_tiles(program.calls),
                      lambda tile: program.tiles[tile].weight_bytes)


def _stays(program: Program, plan: Plan, graph: fx.Graph) -> list[_Stay]:
    block_of = {layer: block[0] for block in plan.blocks(differentiated(program)) for layer in block}
    boundary = boundary_tiles(program.calls)
    found: dict[tuple[str, int], _Stay] = {}
    latest, group = None, 0
    for node in nodes(graph):
        call = program.call(argument(node, "call")) if argument(node, "template") else None
        if call is None or op_of(node).name in call.weightless:
            continue
        # In a backward the weights of a whole block are on the device together. A `forward_saving` of a layer in a block
        # recomputes; other layers' are in the forward and keep residuals.
        in_backward = op_of(node).name in ("backward", "recompute_backward") or (
            op_of(node).name == "forward_saving" and call.name in block_of)
        label = in_backward, block_of.get(call.name, call.name) if in_backward else call.name
        latest, group = label, group + (label != latest)
        for tile in call.tiles:
            found.setdefault((tile, group), _Stay(tile, group, tile in boundary)).uses.append(node)
    return _without_interruption(program, list(found.values()))


def _without_interruption(program: Program, stays: list[_Stay]) -> list[_Stay]:
    """Joins consecutive stays of one tile that several layers' calls read, since it need not arrive again."""
    read = Counter(tile for call in program.calls if call.role == "layer" for tile in call.tiles)
    classes = layer_size_classes(program)
    latest: dict[int, _Stay] = {}
    kept = []
    for stay in stays:
        before = None if stay.boundary else latest.get(classes[stay.tile])
        if before is not None and before.tile == stay.tile and read[stay.tile] > 1:
            before.uses += stay.uses
            continue
        kept.append(stay)
        if not stay.boundary:
            latest[classes[stay.tile]] = stay
    return kept


def _returns(graph: fx.Graph) -> list[_Return]:
    found: dict[fx.Node, _Return] = {}
    loss = None
    for node in nodes(graph):
        loss = node if op_of(node).name == "loss" else loss
        for value in operands(node, "inputs"):
            if op_of(value).result == "stashed":
                found.setdefault(value, _Return(value, loss)).uses.append(node)
    return list(found.values())


def _fetch(program: Program, plan: Plan, graph: fx.Graph) -> None:
    """Inserts a `fetch` for each checkpoint in host memory."""
    build = Builder(graph, name)
    pending, present = deque(_returns(graph)), list[_Return]()
    passed: set[fx.Node] = set()
    loss = None
    for node in list(nodes(graph)):
        while (pending and len(present) < plan.checkpoint_slots and pending[0].stashed in passed
               and pending[0].after is loss):
            back = pending.popleft()
            stashed = back.stashed
            call, mb = argument(stashed, "call"), argument(stashed, "mb")
            fetched = build.before(node, "fetch", f"c{program.number(call)}_{mb}", call=call, mb=mb, stashed=stashed)
            for user in back.uses:
                user.replace_input_with(stashed, fetched)
            present.append(back)
        present = [back for back in present if node is not back.uses[-1]]
        passed.add(node)
        loss = node if op_of(node).name == "loss" else loss


def _insert(program: Program, plan: Plan, graph: fx.Graph) -> fx.Graph:
    build = Builder(graph, name)
    _fetch(program, plan, graph)
    stays = _stays(program, plan, graph)
    pending = deque(s for s in stays if not plan.placement(s.tile).resident and not program.tiles[s.tile].routed_bytes)
    present: list[_Stay] = []
    classes = layer_size_classes(program)
    first = next(iter(nodes(graph)), None)
    for stay in stays:
        if plan.placement(stay.tile).resident and first is not None:
            stay.weights = build.before(first, "resident", f"w{program.number(stay.tile)}", tile=stay.tile)

    def fits(stay: _Stay) -> bool:
        if stay.boundary:
            return all(other.group == stay.group for other in present if other.boundary)
        return sum(classes.get(other.tile) == classes[stay.tile] for other in present) < plan.weight_slots

    def issue(place_next: fx.Node) -> None:
        """Inserts every arrival that fits now, in order of first use, right before `place_next`."""
        while pending and fits(pending[0]):
            stay = pending.popleft()
            number = program.number(stay.tile)
            staging = None if plan.pinned else build.before(place_next, "pack", f"k{number}", tile=stay.tile)
            stay.weights = build.before(place_next, "prefetch", f"w{number}", tile=stay.tile, staging=staging)
            present.append(stay)

    used: dict[fx.Node, list[_Stay]] = {}
    for stay in stays:
        for node in stay.uses:
            used.setdefault(node, []).append(stay)
    for node in list(nodes(graph)):
        issue(node)
        here = used.get(node, [])
        for stay in here:
            if program.tiles[stay.tile].routed_bytes and node is stay.uses[0]:
                stay.weights = build.before(node, "prefetch_routed", f"w{program.number(stay.tile)}", tile=stay.tile,
                                            router=operands(node, "inputs")[0])
            if stay.weights is None:
                raise MegacompileError(
                    f"{plan.weight_slots} weight slots do not hold the weights that {argument(node, 'call')} needs at once; "
                    f"plan at least {_needed(stays, classes)} (checkpoint_interval layers are resident together in the "
                    "backward)")
            if node is stay.uses[-1] and stay in present:
                present.remove(stay)
        if here:
            # In the order of the call's tiles, in which a template expects its weights.
            tiles = program.call(argument(node, "call")).tiles
            weights = {s.tile: s.weights for s in here}
            node.kwargs = {**node.kwargs, "weights": tuple(weights[t] for t in tiles)}
    return graph


def _needed(stays: list[_Stay], classes: Mapping[str, int]) -> int:
    together = [(s.group, classes[s.tile]) for s in stays if not s.boundary]
    return max(map(together.count, together))
