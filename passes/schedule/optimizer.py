"""Adds the update: one clip, then every trainable tile, in the order in which the next forward needs them.

    c = clip(tiles=("prologue", "layers.0", ...))
    update("prologue", c)
    update("layers.0", c)
    w = prefetch("layers.0", into="R0")                    # a resident tile is refreshed at once

A tile whose optimizer state lives on the device is updated there, and its weights are copied to the host after all updates:

    w1, m1, g1 = resident("layers.0"), resident_state("layers.0"), resident_gradients("layers.0")
    update_on_device("layers.0", resident=w1, state=m1, reduced=g1, clip=c)
    offload_weights("layers.0", w1)

A tile whose state visits the device is updated there, in the lane of the copies:

    v5 = update_visiting("layers.5", c, into="V0")

A tile that the device holds since its backward returns in two parts, since the next forward only waits for weights:

    e5 = held("layers.5")
    update_held("layers.5", e5, c)
    return_weights("layers.5", e5)
    return_state("layers.5", e5, c)                        # after the weights of all tiles

If the plan defers moments, the weights of all tiles are updated first, then their moments, in the opposite order:

    update_weights("prologue", c)
    update_weights("layers.0", c)
    update_moments("layers.0", c)
    update_moments("prologue", c)

Moments on disk are read before the update and written after it. Reads run ahead as far as slabs last:

    m5 = read_state("layers.5", into="M0")
    update("layers.5", c, moments=m5)
    write_state("layers.5", m5)

If the plan defers them too, they are read twice, and the next forward waits for no write:

    m5 = read_state("layers.5", into="M0")
    update_weights("layers.5", c, moments=m5)
    m5 = read_state("layers.5", into="M1")
    update_moments("layers.5", c, moments=m5)
    write_state("layers.5", m5)

If the plan updates on arrival, the update follows each tile's `offload` (or `reduce`) in the backward, and nothing is clipped:

    d5 = offload("layers.5", g5, into="D0")
    update("layers.5", slab=d5)

Sections that run outside of steps: `load` copies resident tiles to the device, `store` copies their state to the host,
`refresh` copies gradients that were changed on the host to the device, `rescue` saves weights that a failed update left there.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import fx

from megacompile.ir.placement import Updated
from megacompile.ir.plan import Plan
from megacompile.ir.program import OPS, Builder, Program, argument, boundary_tiles, copy_section, find

from .prefetch import layer_size_classes

name, requires, provides = "optimizer", "offload", "optimizer"
#: The op that updates a tile.
_OPS = {Updated.ON_HOST: "update", Updated.ON_DEVICE: "update_on_device", Updated.VISITING: "update_visiting",
        Updated.HELD: "update_held",
        Updated.FROM_HOST_SUMS: "update_from_sum", Updated.FROM_DISK: "update"}


def run(program: Program, plan: Plan) -> Program:
    tiles = list(dict.fromkeys(tile for call in program.calls for tile in call.tiles))
    sections = dict(program.sections)
    if plan.update == "arrival":
        for key in ("backward", "train_step"):
            if key in sections:
                sections[key] = _on_arrival(program, plan, copy_section(sections[key]))
        sections.pop("backward_accumulate", None)  # an update on arrival consumes gradients
    elif "backward" in sections or "train_step" in sections:
        sections["update"] = _update(program, plan, [t for t in tiles if program.tiles[t].trainable])
    if plan.resident:
        sections["load"] = _load(program, plan, [t for t in tiles if plan.placement(t).resident])
    if plan.resident_state:
        stateful = [t for t in tiles if plan.placement(t).updated is Updated.ON_DEVICE]
        sections["store"] = _each(program, stateful, _store)
        sections["rescue"] = _each(program, stateful, _bring_home)
        if "backward" in sections and plan.update == "step":
            sections["refresh"] = _each(program, stateful, _refresh)
    return program.evolve(stage=provides, sections=sections)


def _arrive(build: Builder, program: Program, plan: Plan, tile: str) -> None:
    staging = None if plan.pinned else build.add("pack", f"k{program.number(tile)}", tile=tile)
    build.add("prefetch", f"w{program.number(tile)}", tile=tile, staging=staging)


def _update(program: Program, plan: Plan, tiles: list[str]) -> fx.Graph:
    graph = fx.Graph()
    build = Builder(graph, name)
    clip = build.add("clip", "c", tiles=tuple(tiles))
    for tile in tiles:
        op = _op(program, plan, tile)
        if op == "update_held":
            held = build.add("held", f"v{program.number(tile)}", tile=tile)
            build.add(op, tile=tile, rule=_rule(program, tile), held=held, clip=clip)
            build.add("return_weights", tile=tile, held=held)
            if plan.placement(tile).resident:
                _arrive(build, program, plan, tile)
            continue
        if op == "update_on_device":
            gradients = build.add("resident_gradients", f"g{program.number(tile)}", tile=tile)
            _update_there(build, program, tile, gradients, clip)
            continue
        if plan.placement(tile).updated is Updated.FROM_DISK:
            moments = build.add("read_state", f"m{program.number(tile)}", tile=tile)
            build.add(op, tile=tile, rule=_rule(program, tile), clip=clip, moments=moments)
            if not plan.deferred_moments:
                build.add("write_state", tile=tile, moments=moments)
        else:
            value = f"v{program.number(tile)}" if OPS[op].result else None
            build.add(op, value, tile=tile, rule=_rule(program, tile), clip=clip)
        if plan.placement(tile).resident:
            _arrive(build, program, plan, tile)
    for node in list(find(graph, "update_held")):
        build.add("return_state", **{name: argument(node, name) for name in ("tile", "held", "clip")})
    for node in reversed([*find(graph, "update_weights")]):
        tile = argument(node, "tile")
        if plan.placement(tile).updated is not Updated.FROM_DISK:
            build.add("update_moments", tile=tile, rule=_rule(program, tile), clip=clip)
            continue
        moments = build.add("read_state", f"m{program.number(tile)}", tile=tile)
        build.add("update_moments", tile=tile, rule=_rule(program, tile), clip=clip, moments=moments)
        build.add("write_state", tile=tile, moments=moments)
    _send_home(program, plan, graph)
    return graph


def _op(program: Program, plan: Plan, tile: str) -> str:
    """The op that updates a tile. In a loop the user may change weights and gradients before the update, so the device holds
    nothing until then, and the host updates those tiles."""
    op = _OPS[plan.placement(tile).updated]
    op = "update" if op == "update_held" and "train_step" not in program.sections else op
    return "update_weights" if op == "update" and plan.deferred_moments else op


def _rule(program: Program, tile: str) -> str | None:
    return program.tiles[tile].rule or None


def _update_there(build: Builder, program: Program, tile: str, reduced: fx.Node, clip: fx.Node | None) -> None:
    weights, state = _there(build, program, tile)
    build.add("update_on_device", tile=tile, rule=_rule(program, tile), resident=weights, state=state, reduced=reduced,
              clip=clip)


def _send_home(program: Program, plan: Plan, graph: fx.Graph) -> None:
    build = Builder(graph, name)
    for tile in plan.resident_state:
        _bring_home(build, program, tile)


def _there(build: Builder, program: Program, tile: str) -> tuple[fx.Node, fx.Node]:
    number = program.number(tile)
    return (build.add("resident", f"w{number}", tile=tile), build.add("resident_state", f"m{number}", tile=tile))


def _on_arrival(program: Program, plan: Plan, graph: fx.Graph) -> fx.Graph:
    """Updates each tile once its gradients are in a slab."""
    build = Builder(graph, name)
    for node in list(find(graph, "reduce")):
        if plan.placement(argument(node, "tile")).updated is Updated.ON_DEVICE:
            following = node.next
            with graph.inserting_before(following):
                _update_there(build, program, argument(node, "tile"), node, None)
    homes = {argument(node, "tile"): node for node in find(graph, "offload", "add_to_sum")}  # the last of each
    position = {node: number for number, node in enumerate(graph.nodes)}
    last = dict(homes)  # the last node that was put after each tile's arrival
    for tile, arrival in _turns(program, plan, sorted(homes, key=lambda tile: position[homes[tile]])):
        op, on_disk = _op(program, plan, tile), plan.placement(tile).updated is Updated.FROM_DISK
        reads = {"slab": homes[tile]} if op == "update" else {}
        if on_disk:
            reads["moments"] = last[arrival] = build.after(last[arrival], "read_state", f"m{program.number(tile)}", tile=tile)
        last[arrival] = build.after(last[arrival], op, None, tile=tile, rule=_rule(program, tile), **reads)
        if on_disk:
            last[arrival] = build.after(last[arrival], "write_state", tile=tile, moments=reads["moments"])
        if plan.placement(tile).resident:
            staging = None
            if not plan.pinned:
                last[arrival] = staging = build.after(last[arrival], "pack", f"k{program.number(tile)}", tile=tile)
            last[arrival] = build.after(last[arrival], "prefetch", f"w{program.number(tile)}", tile=tile, staging=staging)
    _send_home(program, plan, graph)
    return graph


def _turns(program: Program, plan: Plan, arriving: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The order of updates, each with the tile whose arrival it follows. It is the plan's order, except that a tile waiting in
    a slab is updated first if another tile needs a slab and all are taken. `arriving`: tiles in the order of arrival."""
    boundary, classes = boundary_tiles(program.calls), layer_size_classes(program)
    order = [tile for tile in plan.update_order or arriving if tile in arriving]
    group = {tile: -1 if tile in boundary else classes.get(tile, 0) for tile in arriving}  # tiles that take turns in slabs
    summed = set(plan.host_sums)  # a sum has memory of its own
    waiting: set[str] = set()
    before = ""
    for tile in arriving:
        slabs = 1 if tile in boundary else plan.gradient_slabs
        held = [each for each in order if each in waiting and group[each] == group[tile] and each not in summed]
        for each in held[:max(0, len(held) - slabs + 1)]:
            yield each, before
            order.remove(each)
        waiting.add(tile)
        while order and order[0] in waiting:
            yield order[0], tile
            del order[0]
        before = tile


def _load(program: Program, plan: Plan, tiles: list[str]) -> fx.Graph:
    """Fills the resident slots: before the first step, and after weights were changed outside of steps."""
    graph = fx.Graph()
    build = Builder(graph, name)
    for tile in tiles:
        _arrive(build, program, plan, tile)
        if plan.placement(tile).updated is Updated.ON_DEVICE:
            build.add("fetch_state", f"m{program.number(tile)}", tile=tile)
    return graph


def _each(program: Program, tiles: list[str], add: Callable[[Builder, Program, str], None]) -> fx.Graph:
    graph = fx.Graph()
    build = Builder(graph, name)
    for tile in tiles:
        add(build, program, tile)
    return graph


def _store(build: Builder, program: Program, tile: str) -> None:
    state = build.add("resident_state", f"m{program.number(tile)}", tile=tile)
    build.add("store_state", tile=tile, state=state)


def _bring_home(build: Builder, program: Program, tile: str) -> None:
    weights = build.add("resident", f"w{program.number(tile)}", tile=tile)
    build.add("offload_weights", tile=tile, resident=weights)


def _refresh(build: Builder, program: Program, tile: str) -> None:
    build.add("fetch_gradients", f"g{program.number(tile)}", tile=tile)
