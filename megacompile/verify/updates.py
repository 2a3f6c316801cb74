"""Rules about updates: which tiles are updated, from which gradients or sums, and where their moments are."""
from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import fx

from megacompile.ir.ops import UPDATE_OPS
from megacompile.ir.printing import describe
from megacompile.ir.program import Program, argument, find, nodes, op_of, operands, reached, trainable
from megacompile.verify.fault import Fault

# -------------------- Rule `updated`: each trainable tile is updated once, after the clip, and all its copies are refreshed
#: Section that runs between steps -> the op that it has for each tile that is updated on the device.
_MOVES = {"load": "fetch_state", "store": "store_state", "rescue": "offload_weights", "refresh": "fetch_gradients"}


def once(name: str, graph: fx.Graph, ops: tuple[str, ...], tiles: Collection[str],
         often: frozenset[str] = frozenset()) -> Iterator[Fault]:
    """Checks that each of `tiles` has one node of `ops` in the section (those in `often` may have several), and that no other
    tile has one."""
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
    """One clip covers all trainable tiles, except on arrival. Each tile has one update, which takes the clip. Resident copies
    are refreshed after it. What was updated on the device is copied back to the host."""
    tiles, there = trainable(program, program.tiles), updated_there(program)
    for graph in program.sections.values():
        for node in find(graph, "update_moments", *UPDATE_OPS):
            stated, own = argument(node, "rule") or "", program.tiles[argument(node, "tile")].rule
            if stated != own:
                yield Fault(f"{describe(node)} runs the rule {stated or 'adamw'}, and its tile's is {own or 'adamw'}",
                            f"leave rule out, or give rule={own!r}" if not own else f"give it rule={own!r}", node)
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
    yield from _held(program)


def _held(program: Program) -> Iterator[Fault]:
    """Checks each tile that the device holds for its update: the whole step holds the gradients of its last wave and then
    fetches its weights and state, from which it is updated and returned, once each."""
    graph, tiles = program.section("update"), [argument(n, "tile") for n in find(program.section("update"), "update_held")]
    before = program.sections.get("train_step", fx.Graph())
    for name, section, op in (("train_step", before, "hold"), ("train_step", before, "fetch_held"),
                              ("update", graph, "return_weights"), ("update", graph, "return_state")):
        yield from once(name, section, (op,), tiles)
    holds = {argument(node, "tile"): node for node in find(before, "hold")}
    last = {argument(node, "tile"): node for node in find(before, "reduce")}
    for tile, node in holds.items():
        if operands(node, "reduced") != (last[tile],):
            yield Fault(f"{describe(node)} does not take the gradients of {tile} that its update needs", "give it those of "
                        "its last reduce", node, last[tile])
    life = ("update_held", "return_weights", "return_state")
    done: dict[str, list[str]] = {}
    for node in find(graph, *life):
        so_far = done.setdefault(argument(node, "tile"), [])
        if tuple(so_far) != life[:life.index(op_of(node).name)]:
            yield Fault(f"{describe(node)} comes after {', '.join(so_far) or 'no update of its tile'}",
                        f"have {', '.join(life)}, in this order", node)
        if op_of(node).name == "return_state" and operands(node, "clip") != tuple(find(graph, "clip")):
            yield Fault(f"{describe(node)} does not take the clip", "give it the clip of its section", node)
        so_far.append(op_of(node).name)


def _moments(graph: fx.Graph, clips: list[fx.Node]) -> Iterator[Fault]:
    """Checks that each `update_weights` is followed by one `update_moments` of the same tile, with the same clip."""
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
    """The tiles that are updated on the device. Before updates are inserted: the tiles whose gradients stay there."""
    marks = ("update_on_device",) if reached(program, "optimizer") else ("fetch_gradients", "offload_norms")
    found = [argument(node, "tile") for graph in program.sections.values() for node in find(graph, *marks)]
    return list(dict.fromkeys(found if reached(program, "optimizer") else [*found, *consumed_there(program)]))


def consumed_there(program: Program) -> list[str]:
    """The tiles updated on the device whose gradients are never copied to the host. After a whole step, or an update on
    arrival, nothing reads them."""
    if reached(program, "optimizer"):
        return updated_there(program) if "train_step" in program.sections or updates_on_arrival(program) else []
    sent = {argument(node, "tile") for graph in program.sections.values() for node in find(graph, "offload")}
    return [tile for tile in trainable(program, program.tiles) if tile not in sent]


def _copied_home(program: Program, name: str) -> Iterator[Fault]:
    """Checks that weights of tiles that stay on the device are copied back to the host after their update."""
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
    loads = find(program.section("load"), "prefetch", "gather") if "load" in program.sections else ()
    loaded = {argument(node, "tile") for node in loads}
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


# -------------------- Rule `summed`: where the host adds up the gradients of a step's waves in FP32, each wave is added once
def summed_tiles(program: Program, section: str) -> frozenset[str]:
    """The tiles whose gradients the host adds up over the waves of a section. Before stage "offload" this may be any tile."""
    if section != "train_step":
        return frozenset()
    if not reached(program, "offload"):
        return frozenset(program.tiles)
    return frozenset(argument(node, "tile") for node in find(program.section(section), "add_to_sum"))


def summed(program: Program) -> Iterator[Fault]:
    """Where the host adds up a tile's waves, each wave is offloaded once and added once, before the next arrives; the first
    overwrites the sum. After the last wave the update reads the sum, and the clip its norms."""
    if "train_step" not in program.sections:
        return
    graph, tiles = program.section("train_step"), summed_tiles(program, "train_step")
    for tile in sorted(tiles):
        yield from _waves(graph, tile)
        yield from _norms(program, graph, tile)
    for node in find(graph, "norms_of_sum"):
        if argument(node, "tile") not in tiles:
            yield Fault(f"{describe(node)} is of a tile without a sum", "drop it", node)
    for name in ("train_step", "update"):
        for node in find(program.section(name), *UPDATE_OPS) if name in program.sections else ():
            tile, reads_sum = argument(node, "tile"), op_of(node).name == "update_from_sum"
            if reads_sum != (tile in tiles):
                how, other = ("not ", "update") if reads_sum else ("", "update_from_sum")
                yield Fault(f"{describe(node)} would be wrong: gradients of {tile} are {how}added up on the host",
                            f"update it by {other}", node)


def _waves(graph: fx.Graph, tile: str) -> Iterator[Fault]:
    reduced: dict[fx.Node, fx.Node] = {}  # accumulators -> their reduce
    sent: dict[fx.Node, fx.Node] = {}  # reduced -> its offload
    waiting: dict[fx.Node, None] = {}  # offloads whose wave has not been added yet
    begun = False
    for node in nodes(graph):
        for value in operands(node, "accumulators"):
            if argument(value, "tile") == tile:
                reduced.setdefault(value, node)
        if argument(node, "tile") != tile:
            continue
        match op_of(node).name:
            case "accumulate" | "offload_norms":
                yield Fault(f"{describe(node)} overwrites a wave on its way to the sum", "drop it", node)
            case "reduce":
                (value,) = operands(node, "accumulators")
                reduced[value] = node
            case "offload":
                (value,) = operands(node, "reduced")
                if value in sent:
                    yield Fault(f"{describe(node)} offloads a wave that {sent[value].name} has offloaded",
                                "offload each wave once", node, sent[value])
                straight = not any(op_of(user).name == "add_to_sum" for user in node.users)
                before = next((other for other in waiting if straight), None)
                if before is not None:
                    yield Fault(f"{describe(node)} overwrites a wave that was not added to the sum yet", "add_to_sum before it",
                                node, before)
                sent[value] = node
                waiting[node] = None
            case "add_to_sum":
                slab = operands(node, "slab")
                arrived = slab[0] if slab else next(iter(waiting), None)
                if arrived not in waiting:
                    yield Fault(f"{describe(node)} adds a wave that was not offloaded, or was added before",
                                "add each wave once, after its offload", node)
                    continue
                del waiting[arrived]
                if argument(node, "overwrite") == begun:
                    yield Fault(f"{describe(node)} {'loses the waves' if begun else 'adds to the sum of the step'} before it",
                                f"say overwrite={not begun}", node)
                begun = True
    for value, last in reduced.items():
        if op_of(last).name != "reduce":
            yield Fault(f"{value.name} is a wave's share of the gradients of {tile}, and is never reduced", "reduce it", last,
                        value)
    for value in find(graph, "reduce"):
        if argument(value, "tile") == tile and value not in sent:
            yield Fault(f"{describe(value)} is never offloaded: a wave would be lost", "offload each wave once", value)
    for node in waiting:
        yield Fault(f"{describe(node)} is never added to the sum: a wave would be lost", "add_to_sum after it", node)


def _norms(program: Program, graph: fx.Graph, tile: str) -> Iterator[Fault]:
    """Checks that norms are taken once, of the whole sum, after the last wave. Without a clip they are not needed."""
    ops = ("norms_of_sum", "add_to_sum", "offload", "update_from_sum")
    found = [node for node in find(graph, *ops) if argument(node, "tile") == tile]
    arrival = any(op_of(node).name == "update_from_sum" for node in found)
    norms = [node for node in found if op_of(node).name == "norms_of_sum"]
    if arrival or not reached(program, "optimizer"):
        return
    if len(norms) != 1 or found[-1] is not norms[0]:
        yield Fault(f"the clip reads norms of the sum of {tile}, which are taken {len(norms)} times, not once after its last "
                    "wave", "norms_of_sum after the last add_to_sum", found[-1])


# -------------------- Rule `on_disk`: moments on disk are read into a slab before their update, and written from it once
#: Ops that change a tile's moments in a slab.
_CHANGE = ("update", "update_moments")


def on_disk(program: Program) -> Iterator[Fault]:
    """Moments on disk are read into a slab before their update, and written from it once, afterwards. Where weights are
    updated before moments, they are read once for each, and only the second slab is written."""
    for name, graph in program.sections.items():
        tiles: dict[str, _Tile] = {}
        for node in find(graph, "read_state", "write_state", "update_moments", *UPDATE_OPS):
            tile, op = argument(node, "tile"), op_of(node).name
            there = program.tiles[tile].disk_bytes > 0
            if there != (op in ("read_state", "write_state") or bool(operands(node, "moments"))):
                where = "on disk" if there else "in memory"
                remedy = "give it the value of read_state as moments" if there else "update it without moments in a slab"
                yield Fault(f"{describe(node)} would be wrong: the moments of {tile} are {where}", remedy, node)
            elif there:
                yield from tiles.setdefault(tile, _Tile(name)).step(node, op)
        for state in tiles.values():
            yield from state.end()


@dataclass
class _Tile:
    """The accesses of a section to the moments of a tile: the node that `read` them last, whether that slab served weights
    alone, and the nodes that `updated` and have `written` them."""

    section: str
    read: fx.Node | None = None
    served: bool = False
    updated: fx.Node | None = None
    written: fx.Node | None = None

    def step(self, node: fx.Node, op: str) -> Iterator[Fault]:
        if op == "read_state":
            if self.read is not None and (self.updated is not None or not self.served):
                yield Fault(f"{describe(node)} reads moments that {self.read.name} has read", "read each tile's once, or once "
                            "for its weights' update and once for its moments'", node, self.read)
            self.read, self.served = node, False
            return
        if operands(node, "moments") != (self.read,):
            yield Fault(f"{describe(node)} takes {operands(node, 'moments')[0].name}, and not the moments that {self.section} "
                        "has read", "give it the value of read_state", node, self.read)
        if op == "update_weights":
            self.served = True
        elif op in _CHANGE:
            self.updated = node
        else:
            if self.updated is None or self.written is not None:
                why = "were written before" if self.written is not None else "are not updated"
                yield Fault(f"{describe(node)} writes moments that {why}", "write each tile's once, after its update", node,
                            self.written)
            self.written = node

    def end(self) -> Iterator[Fault]:
        if self.read is None:
            return
        if self.updated is None:
            yield Fault(f"{describe(self.read)} reads moments that {self.section} does not update", "update the tile after it",
                        self.read)
        if self.written is None:
            yield Fault(f"{describe(self.read)} reads moments that {self.section} never writes back: their update would be "
                        "lost", "write_state after the update", self.read)
