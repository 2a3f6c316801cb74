"""Rule `summed`: where the host adds up the gradients of a step's waves in FP32, each wave is added once."""
from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from megacompile.ir.listing import describe
from megacompile.ir.ops import UPDATE_OPS
from megacompile.ir.program import Program, argument, find, nodes, op_of, operands, reached
from megacompile.verify.fault import Fault


def summed_tiles(program: Program, section: str) -> frozenset[str]:
    """The tiles whose gradients the host adds up over the waves of a section. Before stage "offload" any tile may be one."""
    if section != "train_step":
        return frozenset()
    if not reached(program, "offload"):
        return frozenset(program.tiles)
    return frozenset(argument(node, "tile") for node in find(program.section(section), "add_to_sum"))


def summed(program: Program) -> Iterator[Fault]:
    """Where the host adds up a tile's waves, each wave's accumulators are reduced and offloaded once, and each wave is added to
    the sum once, before the next wave arrives. The first wave overwrites the sum, the others add to it. After the last wave
    the update reads the sum and the clip reads the sum's norms. No other tile's update reads a sum."""
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
    """Norms are taken once, of the whole sum, after the last wave. Where nothing is clipped no norms are needed."""
    ops = ("norms_of_sum", "add_to_sum", "offload", "update_from_sum")
    found = [node for node in find(graph, *ops) if argument(node, "tile") == tile]
    arrival = any(op_of(node).name == "update_from_sum" for node in found)
    norms = [node for node in found if op_of(node).name == "norms_of_sum"]
    if arrival or not reached(program, "optimizer"):
        return
    if len(norms) != 1 or found[-1] is not norms[0]:
        yield Fault(f"the clip reads norms of the sum of {tile}, which are taken {len(norms)} times, not once after its last "
                    "wave", "norms_of_sum after the last add_to_sum", found[-1])
