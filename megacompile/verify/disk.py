"""Rule `on_disk`: moments on disk travel around their update, once."""
from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from megacompile.ir.listing import describe
from megacompile.ir.program import Program, argument, find, op_of, operands
from megacompile.verify.fault import Fault
from megacompile.verify.sums import UPDATE_OPS


def on_disk(program: Program) -> Iterator[Fault]:
    """A section that updates a tile whose moments are on disk reads them into a slab once, before the update, which works on
    this slab. It writes them back from there once, after the update. Nothing of other tiles is read or written."""
    for name, graph in program.sections.items():
        yield from _travels(program, name, graph)


def _travels(program: Program, name: str, graph: fx.Graph) -> Iterator[Fault]:
    read: dict[str, fx.Node] = {}
    updated: dict[str, fx.Node] = {}
    written: dict[str, fx.Node] = {}
    for node in find(graph, "read_state", "write_state", *UPDATE_OPS):
        tile, op = argument(node, "tile"), op_of(node).name
        there = program.tiles[tile].disk_bytes > 0
        if there != (op in ("read_state", "write_state", "adam_from_disk")):
            where, other = ("on disk", "adam_from_disk, between read_state and write_state") if there else ("in memory", "adam")
            yield Fault(f"{describe(node)} would be wrong: the moments of {tile} are {where}", f"update it by {other}", node)
        if not there or op not in ("read_state", "write_state", "adam_from_disk"):
            continue
        if op == "read_state":
            if tile in read:
                yield Fault(f"{describe(node)} reads moments that {read[tile].name} has read", "read each tile's once", node,
                            read[tile])
            read[tile] = node
            continue
        if operands(node, "moments") != (read.get(tile),):
            yield Fault(f"{describe(node)} takes {operands(node, 'moments')[0].name}, and not the moments that {name} has read",
                        "give it the value of read_state", node, read.get(tile))
        if op == "adam_from_disk":
            updated[tile] = node
            continue
        if tile not in updated or tile in written:
            why = "were written before" if tile in written else "are not updated"
            yield Fault(f"{describe(node)} writes moments that {why}", "write each tile's once, after its update", node,
                        written.get(tile))
        written[tile] = node
    for tile, node in read.items():
        if tile not in updated:
            yield Fault(f"{describe(node)} reads moments that {name} does not update", "update the tile after it", node)
        if tile not in written:
            yield Fault(f"{describe(node)} reads moments that {name} never writes back: their update would be lost",
                        "write_state after the update", node)
