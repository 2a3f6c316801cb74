"""Rule `on_disk`: moments on disk are read into a slab before their update, and written from it once."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from megacompile.ir.listing import describe
from megacompile.ir.ops import UPDATE_OPS
from megacompile.ir.program import Program, argument, find, op_of, operands
from megacompile.verify.fault import Fault

#: Ops that change a tile's moments in a slab.
_CHANGE = ("update", "update_moments")


def on_disk(program: Program) -> Iterator[Fault]:
    """A section that updates a tile whose moments are on disk reads them into a slab before the update, which works on this
    slab, and writes them back from there once, after the update. Where weights are updated before moments, it reads them once
    for each, and only the second slab is written. Nothing of other tiles is read or written."""
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
    """What a section has done with the moments of a tile: the node that `read` them last, whether that slab served weights
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
