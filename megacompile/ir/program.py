"""The vocabulary of schedules: places and `Program`, a set of `torch.fx.Graph`s over the ops of `ops.py`.

Problem: a training step of a streamed model is copies, kernels and optimizer updates on several lanes. Policy: each of
them is one node of a graph that can be printed, verified, simulated and run.

A program has *sections* (forward, evaluate, backward, backward_accumulate, update, load), each a straight line of nodes in
program order. Program order gives the meaning (`runtime/reference.py`); between lanes only `record`/`wait` order anything.
Sections are run in whatever order the user's loop asks for, so each declares with `enter` and `leave` the events that it
takes from, and hands to, whatever runs before and after it.

*Places* are where values live, as strings: a slot ("W0", a device buffer that tiles take turns in), a host slab ("D3"),
a part of a tile in host memory ("weights/layers.0", "gradients/layers.0"), or the value's own memory ("%h1_0").
"""
from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from megacompile.ir.ops import OPS as OPS
from megacompile.ir.ops import Access as Access
from megacompile.ir.ops import Lane as Lane
from megacompile.ir.ops import Op as Op

TILE_PARTS = ("weights", "gradients", "sums")
#: What is read in the stead of a part of a tile, where a node has it.
_INSTEAD = {"weights": "staging", "gradients": "slab"}
#: Families of slots, by the capital letters of a slot's name (a "B" after them: for border tiles; "b", "c", ...: for the
#: second, third, ... tile of a layer), and what kind of values each holds. R: weights that stay on the device; RW, RS, RG:
#: weights, optimizer state and gradients of a tile that is updated there; S, D: pinned host slabs for weights on their way
#: out and gradients on their way home; H: pinned host buffers of checkpoints, a set of them for each open forward; C:
#: checkpoints that have come back; V: a chunk of a tile that visits the device for its update.
SLOT_KINDS = {"W": ("weights",), "G": ("reduced",), "S": ("staging",), "D": ("slab",),
              "H": ("stashed",), "C": ("checkpoint", "inputs"), "V": ("visiting",),
              "R": ("weights",), "RW": ("weights", "resident"), "RS": ("state",), "RG": ("gradients", "reduced")}
#: Bytes of a chunk: copies of a few MiB each reach the link's rate, and plans hardly miss the memory.
VISITING_BYTES = 1 << 25


def op_of(node: fx.Node) -> Op:
    assert isinstance(node.target, Op), f"{node.format_node()} is not an op of a schedule"
    return node.target


def argument(node: fx.Node, name: str) -> Any:
    return node.kwargs.get(name)


def operands(node: fx.Node, name: str) -> tuple[fx.Node, ...]:
    """The nodes that a parameter holds: none, one or several."""
    value = node.kwargs.get(name)
    if isinstance(value, fx.Node):
        return (value,)
    return tuple(v for v in value if isinstance(v, fx.Node)) if isinstance(value, (tuple, list)) else ()


def lane_of(node: fx.Node) -> Lane | None:
    """The lane that executes a node. A release of a value's own memory happens where that memory is used, in compute;
    the release of a slot is a mark for the verifier and runs nowhere."""
    op = op_of(node)
    if op.name == "wait":
        return Lane(argument(node, "lane"))
    if op.name == "record":
        return lane_of(operands(node, "node")[0])
    if op.name == "release":
        return Lane.COMPUTE if place_of(operands(node, "value")[0]).startswith("%") else None
    return op.lane


def place_of(node: fx.Node) -> str:
    """Where a node's value lives. Before `place` has named slots, every value lives in memory of its own."""
    if argument(node, "into") is not None:
        return str(argument(node, "into"))
    if op_of(node).home is not None:
        return f"{op_of(node).home}/{argument(node, 'tile')}"
    return f"%{node.name}"


def accesses(node: fx.Node) -> list[tuple[str, Access]]:
    """(place, access) of everything that a node touches, from the table above."""
    op, found = op_of(node), []
    for rules, access in ((op.reads, Access.READ), (op.writes, Access.WRITE)):
        for rule in rules:
            if rule == "result":
                found.append((place_of(node), access))
            elif "[" in rule:
                part, parameter = rule.rstrip("]").split("[")
                if access == Access.READ and argument(node, _INSTEAD.get(part, "")) is not None:
                    continue  # the slab is read in the tile's stead
                tiles = argument(node, parameter)
                found += [(f"{part}/{t}", access) for t in (tiles if isinstance(tiles, tuple | list) else (tiles,))]
            else:
                found += [(place_of(value), access) for value in operands(node, rule)]
    return found


@functools.cache
def lanes_that(access: Access, kind: str) -> frozenset[Lane]:
    """The lanes in which some op may access a place of this kind (`place_kind`): what a section must expect of others."""
    part = kind.removeprefix("host ")
    at_home = part != kind
    found = set()
    for op in OPS.values():
        rules = op.reads if access == Access.READ else op.writes
        if at_home:
            touches = any(r.startswith(f"{part}[") for r in rules) or ("result" in rules and op.home == part)
        else:
            touches = any(held in rules or ("result" in rules and op.result == held) for held in SLOT_KINDS[kind])
        if touches and op.lane is not None:
            found.add(op.lane)
    return frozenset(found)


def lanes_against(access: Access, kind: str) -> frozenset[Lane]:
    """The lanes in which some op may conflict with an access to a place of this kind: with a read writes, with a write all."""
    return lanes_that(Access.WRITE, kind) | (lanes_that(Access.READ, kind) if access == Access.WRITE else frozenset())


def place_kind(place: str) -> str | None:
    """"W" for "W0", "host weights" for "weights/layers.0": the family of places that ops treat alike. None: memory of a
    value's own, which no other section knows."""
    return None if place.startswith("%") else _kind_of_known(place)


@functools.lru_cache(maxsize=4096)
def _kind_of_known(place: str) -> str:
    part = place.split("/")[0]
    return f"host {part}" if part in TILE_PARTS else slot_family(place)


def slot_family(slot: str) -> str:
    """"W" for "W0", "WB0" and "Wb0"."""
    return slot.rstrip("0123456789").rstrip("bcdefghijklmnopqrstuvwxyz").removesuffix("B")


def slot_ranks(layers: Iterable[Sequence[str]], border: Collection[str], weight_bytes: Callable[[str], int]) -> dict[str, int]:
    """Of each tile that `layers` (the tiles of each) read, those in `border` aside: its rank among the tiles of its layer, the
    largest first. All of a layer's are there at once, and those of one rank take turns in slots that fit them."""
    ranks: dict[str, int] = {}
    for tiles in layers:
        new = sorted((t for t in tiles if t not in ranks and t not in border), key=lambda t: -weight_bytes(t))
        taken = {ranks[t] for t in tiles if t in ranks}
        ranks |= zip(new, (rank for rank in itertools.count() if rank not in taken), strict=False)
    return ranks


def rank_letter(rank: int) -> str:
    """What stands behind the letters of a slot's family: nothing for the first rank, then b, c, ..."""
    assert rank < 26, f"{rank + 1} tiles in one layer"
    return "" if rank == 0 else chr(ord("a") + rank)


def stays(place: str) -> bool:
    """Whether what is there outlives sections."""
    return place.startswith("R")


@dataclass(frozen=True)
class Tile:
    """The host memory of one layer (or of the prologue, the epilogue, a tied weight), as a schedule sees it.

    Bytes are those of one transfer over the link; `state_bytes` of the optimizer's state."""

    name: str
    parameters: int
    weight_bytes: int
    gradient_bytes: int
    trainable: bool
    state_bytes: int = 0

    def bytes_of(self, kind: str) -> int:
        """Bytes of a value of this kind in a slot."""
        if kind == "state":
            return self.state_bytes
        if kind == "visiting":
            return min(VISITING_BYTES, self.state_bytes + 2 * self.weight_bytes)
        return self.weight_bytes if kind in ("weights", "staging") else self.gradient_bytes

    def moved_bytes(self, op: Op) -> int:
        """Bytes that a copy moves."""
        if op.name == "offload_norms":
            return 0  # a few
        return self.weight_bytes if op.name == "offload_weights" else self.bytes_of(op.result or "")


@dataclass(frozen=True)
class CallSpec:
    """One use of a template: the prologue, each layer, the epilogue, in order.

    `weightless` lists the variants that read no weights (an embedding's backward needs only indices); `output_bytes` are
    those of what it hands on of one sequence."""

    name: str
    role: str  # "prologue", "layer", "epilogue"
    template: str
    tiles: tuple[str, ...]
    weightless: tuple[str, ...] = ()
    output_bytes: int = 0


@dataclass(frozen=True)
class Slot:
    """A buffer that values take turns in. Families by the letters of the name: `SLOT_KINDS`."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Program:
    """A schedule at some stage of compilation. Passes never change one; they return another."""

    stage: str
    micro_batches: tuple[int, ...]
    tiles: Mapping[str, Tile]
    calls: tuple[CallSpec, ...]
    slots: Mapping[str, Slot] = field(default_factory=dict)
    sections: Mapping[str, fx.Graph] = field(default_factory=dict)

    def section(self, name: str) -> fx.Graph:
        return self.sections[name]

    def evolve(self, **changes: Any) -> Program:
        return replace(self, **changes)

    def call(self, name: str) -> CallSpec:
        return next(c for c in self.calls if c.name == name)

    def number(self, name: str) -> int:
        """The position of a call, or of the first call that reads a tile: w3, h3 and g3 belong to the same layer."""
        return next(i for i, call in enumerate(self.calls) if name == call.name or name in call.tiles)

    def value_bytes(self, node: fx.Node) -> int:
        """Bytes of the value of a node in a slot: of a tile, or of a call's output for a micro-batch."""
        if argument(node, "tile") is not None:
            return self.tiles[argument(node, "tile")].bytes_of(op_of(node).result or "")
        sequences: int = self.micro_batches[argument(node, "mb")]
        return self.call(argument(node, "call")).output_bytes * sequences

    def moved_bytes(self, node: fx.Node) -> int:
        """Bytes that a node copies from one memory to another."""
        if op_of(node).name in ("stash", "fetch"):
            return self.value_bytes(node)
        tile = argument(node, "tile")
        return self.tiles[tile].moved_bytes(op_of(node)) if tile is not None else 0

    def text(self, section: str | None = None, *, fold: bool = False) -> str:
        """Python that rebuilds this program (`text.parse`). `fold` folds repeated layers, for reading only."""
        from megacompile.ir import folding
        from megacompile.ir import text as printing
        return folding.fold(self, section) if fold else printing.print_program(self, section)

    def table(self, section: str | None = None) -> str:
        from megacompile.ir import listing
        return listing.table(self, section)

    def __str__(self) -> str:
        return self.text()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self.text() == other.text()

    def __hash__(self) -> int:
        return hash(self.text())


class Builder:
    """Appends nodes to a graph, or inserts them before or after a node."""

    def __init__(self, graph: fx.Graph, source: str = "") -> None:
        self.graph, self.source = graph, source

    def add(self, op: str, name: str | None = None, **arguments: Any) -> fx.Node:
        spec = OPS[op]
        unknown = [p for p in arguments if p not in spec.parameters]
        missing = [p for p in spec.required if arguments.get(p) is None]
        assert not unknown and not missing, f"{op}: unknown {unknown}, missing {missing}"
        given = {p: arguments[p] for p in spec.parameters if arguments.get(p) is not None}
        node = self.graph.create_node("call_function", spec, name=name)
        node.kwargs = given  # given to create_node, torch 2.13 walks through them, which takes longer than all else here
        node.meta["pass"] = self.source
        return node

    def before(self, node: fx.Node, op: str, name: str | None = None, **arguments: Any) -> fx.Node:
        with self.graph.inserting_before(node):
            return self.add(op, name, **arguments)

    def after(self, node: fx.Node, op: str, name: str | None = None, **arguments: Any) -> fx.Node:
        with self.graph.inserting_after(node):
            return self.add(op, name, **arguments)


def nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes of a section in program order."""
    return (n for n in graph.nodes if n.op == "call_function")


def find(graph: fx.Graph, *ops: str) -> Iterator[fx.Node]:
    return (n for n in nodes(graph) if op_of(n).name in ops)


def gives_outputs(program: Program) -> bool:
    """Whether training gives the caller the epilogue's outputs, whose gradient then comes from the caller, and not a loss."""
    return "forward" in program.sections and any(find(program.section("forward"), "outputs"))


def differentiated(program: Program) -> list[str]:
    """The layers that a backward goes through: those below the first call that trains anything have none."""
    first = next((i for i, call in enumerate(program.calls) if any(program.tiles[t].trainable for t in call.tiles)),
                 len(program.calls))
    return [call.name for call in program.calls[first:] if call.role == "layer"]


def copy_section(graph: fx.Graph) -> fx.Graph:
    """A copy with the same node names and provenance, so that a pass may rewrite it."""
    return rebuild(graph, lambda node, arguments, build: build.add(op_of(node).name, node.name, **arguments))


def rebuild(graph: fx.Graph, visit: Callable[[fx.Node, dict[str, Any], Builder], fx.Node | None],
            source: str = "") -> fx.Graph:
    """A new section, made by visiting each node in program order with its arguments mapped into the new graph.

    `visit` adds what should stand for the node and returns the node that its users should see."""
    new = fx.Graph()
    build = Builder(new, source)
    image: dict[fx.Node, fx.Node] = {}
    for node in nodes(graph):
        arguments = {k: fx.map_arg(v, lambda n: image[n]) for k, v in node.kwargs.items()}
        made = visit(node, arguments, build)
        if made is not None:
            image[node] = made
            if not source or made.meta.get("pass") == source and op_of(made) is op_of(node):
                made.meta["pass"] = node.meta.get("pass", "")
    return new


def uses(graph: fx.Graph, value: fx.Node) -> list[fx.Node]:
    """Users of a value in program order. (`fx.Node.users` is in the order in which uses were added.)"""
    return [n for n in nodes(graph) if value in n.all_input_nodes]


def places(graphs: Iterable[fx.Graph]) -> set[str]:
    return {place for graph in graphs for node in nodes(graph) for place, _ in accesses(node)}


#: The stages of compilation, in order; a stage is named after the pass that made it.
STAGES = ("model", "micro_batch", "partition", "differentiate", "prefetch", "offload", "optimizer", "place",
          "synchronize")


def reached(program: Program, stage: str) -> bool:
    """Whether a program has been through the pass of that name."""
    return STAGES.index(program.stage) >= STAGES.index(stage)
