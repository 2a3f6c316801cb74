"""Rule `updated`: each trainable tile is updated once, after the clip, and all its copies are refreshed."""
from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import fx

from megacompile.ir.listing import describe
from megacompile.ir.ops import UPDATE_OPS
from megacompile.ir.program import Program, argument, find, op_of, operands, reached, trainable
from megacompile.verify.fault import Fault

#: Section that runs between steps -> the op that it has for each tile that is updated on the device.
_MOVES = {"load": "fetch_state", "store": "store_state", "rescue": "offload_weights", "refresh": "fetch_gradients"}


def once(name: str, graph: fx.Graph, ops: tuple[str, ...], tiles: Collection[str],
         often: frozenset[str] = frozenset()) -> Iterator[Fault]:
    """Each of `tiles` has one node of `ops` in the section; those in `often` may have several. No other tile has one."""
    op = ops[0]
    seen: dict[str, fx.Node] = {}
    for node in find(graph, *ops):
        tile = argument(node, "tile")
        if tile in seen and tile not in often:
            yield Fault(f"tile {tile} has a second {op} in {name}", f"{op} each trainable tile once", node, seen[tile])
        if tile not in tiles:
            yield Fault(f"tile {tile} has {op} in {name}, but does not train", "leave frozen tiles alone", node)
        seen[tile] = node
    for tile in tiles:
        if tile not in seen:
            yield Fault(f"tile {tile} trains, but has no {op} in {name}", f"{op} each trainable tile once")


def updated(program: Program) -> Iterator[Fault]:
    """One clip covers all trainable tiles. Then each tile has one update, which takes the clip. `load` copies a resident tile
    to the device, and each update is followed by another copy. A tile that is updated on the device is copied back to the
    host. Updates on arrival have no clip."""
    tiles, there = trainable(program, program.tiles), updated_there(program)
    for name, op in _MOVES.items():
        if name in program.sections and there:
            yield from once(name, program.section(name), (op,), there)
    yield from _loaded(program)
    if updates_on_arrival(program):
        if "update" in program.sections:
            yield Fault("tiles are updated on arrival of their gradients, and again in update", "update each tile once",
                        next(find(program.section("update"), *UPDATE_OPS), None))
        for name in ("backward", "train_step"):
            if name in program.sections:
                yield from once(name, program.section(name), UPDATE_OPS, tiles)
                yield from _refreshed(program, name, tiles)
                yield from _copied_home(program, name)
        return
    if "update" not in program.sections:
        if "backward" in program.sections or "train_step" in program.sections:
            yield Fault("the program has a backward and no update", "add the section")
        return
    graph = program.section("update")
    clips = list(find(graph, "clip"))
    if len(clips) != 1 or sorted(argument(clips[0], "tiles")) != sorted(tiles):
        yield Fault("update needs one clip over all trainable tiles", "clip once, over every trainable tile",
                    clips[-1] if clips else None)
    yield from once("update", graph, UPDATE_OPS, tiles)
    for node in find(graph, *UPDATE_OPS):
        if operands(node, "clip") != tuple(clips):
            yield Fault(f"{describe(node)} does not take the clip", "give it the clip of its section", node)
    yield from _moments(graph, clips)
    yield from _refreshed(program, "update", tiles)
    yield from _copied_home(program, "update")


def _moments(graph: fx.Graph, clips: list[fx.Node]) -> Iterator[Fault]:
    """Each `update_weights` is followed by one `update_moments` of the same tile, with the same clip."""
    waiting: dict[str, fx.Node] = {}
    for node in find(graph, "update_weights", "update_moments"):
        tile = argument(node, "tile")
        if op_of(node).name == "update_weights":
            waiting[tile] = node
        elif waiting.pop(tile, None) is None:
            yield Fault(f"{describe(node)} does not follow an update_weights of {tile}",
                        "update each tile's moments once, after its weights", node)
        elif operands(node, "clip") != tuple(clips):
            yield Fault(f"{describe(node)} does not take the clip", "give it the clip of its section", node)
    for tile, node in waiting.items():
        yield Fault(f"{describe(node)} updates the weights of {tile}, but nothing updates its moments",
                    "add update_moments after it", node)


def updates_on_arrival(program: Program) -> bool:
    return any(True for name in ("backward", "train_step") if name in program.sections
               for _ in find(program.section(name), *UPDATE_OPS))


def updated_there(program: Program) -> list[str]:
    """The tiles that are updated on the device; before there are updates, those whose gradients stay there."""
    marks = ("update_on_device",) if reached(program, "optimizer") else ("fetch_gradients", "offload_norms")
    found = [argument(node, "tile") for graph in program.sections.values() for node in find(graph, *marks)]
    return list(dict.fromkeys(found if reached(program, "optimizer") else [*found, *consumed_there(program)]))


def consumed_there(program: Program) -> list[str]:
    """The tiles updated on the device whose gradients are never copied to the host: after a whole step, or an update on
    arrival, none are read."""
    if reached(program, "optimizer"):
        return updated_there(program) if "train_step" in program.sections or updates_on_arrival(program) else []
    sent = {argument(node, "tile") for graph in program.sections.values() for node in find(graph, "offload")}
    return [tile for tile in trainable(program, program.tiles) if tile not in sent]


def _copied_home(program: Program, name: str) -> Iterator[Fault]:
    """Weights that were updated on the device are then copied back to the host."""
    graph = program.section(name)
    updated: dict[str, fx.Node] = {}
    for node in find(graph, "update_on_device", "offload_weights"):
        tile = argument(node, "tile")
        if op_of(node).name == "update_on_device":
            updated[tile] = node
        else:
            updated.pop(tile, None)
    for tile, node in updated.items():
        yield Fault(f"tile {tile} is updated on the device in {name}, but the host keeps its old weights",
                    "offload_weights after its update", node)


def _loaded(program: Program) -> Iterator[Fault]:
    loaded = {argument(n, "tile") for n in find(program.section("load"), "prefetch")} if "load" in program.sections else set()
    for graph in program.sections.values():
        for node in find(graph, "resident"):
            if argument(node, "tile") not in loaded:
                yield Fault(f"tile {argument(node, 'tile')} is resident on the device, but load does not copy it there",
                            "prefetch it in load", node)


def _refreshed(program: Program, name: str, tiles: Collection[str]) -> Iterator[Fault]:
    graph = program.section(name)
    resident = {argument(node, "tile"): node for g in program.sections.values() for node in find(g, "resident")}
    fresh: dict[str, fx.Node | None] = {}
    for node in find(graph, *UPDATE_OPS, "prefetch", "gather"):
        fresh[argument(node, "tile")] = node if op_of(node).name in ("update_on_device", "prefetch", "gather") else None
    for tile, node in resident.items():
        if tile in tiles and fresh.get(tile) is None:
            yield Fault(f"tile {tile} is resident on the device, but {name} leaves its old weights there",
                        "prefetch it after its update", node)
