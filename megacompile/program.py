"""The vocabulary of schedules: lanes, places, ops, and `Program`, a set of `torch.fx.Graph`s over those ops.

Problem: a training step of a streamed model is copies, kernels and optimizer updates on several lanes. Policy: each of
them is one node of a graph that can be printed, verified, simulated and run; a fact about an op is stated once, here.

A program has *sections* (forward, evaluate, backward, backward_accumulate, update, load), each a straight line of nodes in
program order. Program order gives the meaning (`runtime/reference.py`); between lanes only `record`/`wait` order anything.
Sections are run in whatever order the user's loop asks for, so each declares with `enter` and `leave` the events that it
takes from, and hands to, whatever runs before and after it.

*Places* are where values live, as strings: a slot ("W0", a device buffer that tiles take turns in), a host slab ("D3"),
a part of a tile in host memory ("weights/layers.0", "gradients/layers.0"), or the value's own memory ("%h1_0").
"""
from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx


class Lane(enum.StrEnum):
    """A queue of instructions that run one after the other; lanes run beside each other."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    CPU = "cpu"
    PACK = "pack"


class Access(enum.StrEnum):
    READ = "read"
    WRITE = "write"


@dataclass(frozen=True)
class Op:
    """One word of the language.

    `parameters` are the keyword arguments of its nodes, in printed order; `optional` ones may be absent (None).
    `reads` and `writes` name places by rule: a parameter's name stands for the places of the values it holds, "result" for
    the node's own place, and "weights[tile]" for that part of the tile named by parameter `tile` (or by each of `tiles`).
    """

    name: str
    lane: Lane | None
    parameters: tuple[str, ...]
    optional: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    result: str | None = None  # what kind of value a node of this op is; None: no value
    meaning: str = ""
    home: str | None = None  # the part of the tile that holds the result where no `into` is given

    @property
    def __name__(self) -> str:  # fx prints and hashes targets by name
        return self.name

    def __call__(self, **_: Any) -> Any:
        raise AssertionError(f"{self.name} is a word of a schedule; an executor gives it its meaning")


# Values that a compute op reads. `saved` is a forward_saving node whose residuals a backward consumes.
_RUN = ("template", "call", "mb", "weights", "inputs")

OPS: dict[str, Op] = {op.name: op for op in (
    Op("pack", Lane.PACK, ("tile", "into"), ("into",), ("weights[tile]",), ("result",), "staging",
       "copies a tile's weights into a page-locked slab"),
    Op("prefetch", Lane.H2D, ("tile", "staging", "into"), ("staging", "into"), ("weights[tile]", "staging"), ("result",),
       "weights", "a tile's weights, host -> a weight slot (from the tile, or from the slab `staging`)"),
    Op("resident", None, ("tile", "into"), ("into",), (), (), "weights", "the weights of a tile that lives on the device"),
    Op("resident_state", None, ("tile", "into"), ("into",), (), (), "state", "its optimizer state, where that lives there too"),
    Op("resident_gradients", None, ("tile", "into"), ("into",), (), (), "gradients", "its gradients, until the update"),
    Op("forward", Lane.COMPUTE, _RUN, ("weights",), ("weights", "inputs"), ("result",), "activation",
       "runs a template"),
    Op("forward_saving", Lane.COMPUTE, _RUN, ("weights",), ("weights", "inputs"), ("result",), "activation",
       "runs a template and keeps its residuals"),
    Op("loss", Lane.COMPUTE, (*_RUN, "accumulators"), ("weights", "accumulators"), ("weights", "inputs"),
       ("accumulators", "result"), "gradient", "the epilogue's loss, and its gradients for a unit loss"),
    Op("evaluate", Lane.COMPUTE, _RUN, ("weights",), ("weights", "inputs"), ("result",), "activation",
       "the epilogue's loss and logits, without gradients"),
    Op("logits", Lane.COMPUTE, _RUN, ("weights",), ("weights", "inputs"), ("result",), "activation",
       "the epilogue's logits, of a batch without labels"),
    Op("recompute_backward", Lane.COMPUTE, (*_RUN, "gradient", "accumulators"), ("weights", "accumulators"),
       ("weights", "inputs", "gradient"), ("accumulators", "result"), "gradient",
       "a layer's backward from its inputs, forward and backward in one graph"),
    Op("backward", Lane.COMPUTE, (*_RUN, "saved", "gradient", "accumulators"), ("weights", "accumulators"),
       ("weights", "inputs", "saved", "gradient"), ("accumulators", "result"), "gradient",
       "a layer's backward from its residuals"),
    Op("zeros", Lane.COMPUTE, ("tile",), (), (), ("result",), "accumulators", "a tile's FP32 gradient accumulators, zeroed"),
    Op("scale", Lane.COMPUTE, ("value",), (), ("value",), ("value",), None,
       "multiplies by the gradient that the caller's loss sent"),
    Op("reduce", Lane.COMPUTE, ("tile", "accumulators", "into"), ("into",), ("accumulators",), ("result",), "reduced",
       "FP32 accumulators -> gradients in link precision, and each parameter's norm"),
    Op("offload", Lane.D2H, ("tile", "reduced", "into"), ("into",), ("reduced",), ("result",), "slab",
       "gradients, device -> the tile's gradients (or the slab `into`)", "gradients"),
    Op("offload_norms", Lane.D2H, ("tile", "reduced"), (), ("reduced",), ("gradients[tile]",), None,
       "the norms alone, of gradients that stay on the device"),
    Op("accumulate", Lane.CPU, ("tile", "slab", "overwrite"), (), ("slab",), ("gradients[tile]",), None,
       "adds a slab to the tile's gradients (or overwrites them)"),
    Op("clip", Lane.CPU, ("tiles",), (), ("gradients[tiles]",), ("result",), "clip",
       "the global norm of all gradients, and the factor that clips them"),
    Op("adam", Lane.CPU, ("tile", "clip"), ("clip",), ("gradients[tile]", "clip"), ("weights[tile]",), None,
       "the fused AdamW update of one tile"),
    # Host state is no place: only these two and `adam` touch it, all of them in the cpu lane.
    Op("fetch_state", Lane.CPU, ("tile", "into"), ("into",), (), ("result",), "state",
       "a tile's optimizer state, host -> device"),
    Op("store_state", Lane.CPU, ("tile", "state"), (), ("state",), (), None, "a tile's optimizer state, device -> host"),
    # In the cpu lane too, so that no schedule without them has a lane more to wait for.
    Op("fetch_gradients", Lane.CPU, ("tile", "into"), ("into",), ("gradients[tile]",), ("result",), "gradients",
       "a tile's gradients, host -> device: they were added up, or changed, on the host"),
    Op("offload_weights", Lane.CPU, ("tile", "resident"), (), ("resident",), ("weights[tile]",), None,
       "weights that were updated on the device, device -> host"),
    Op("adam_resident", Lane.COMPUTE, ("tile", "resident", "state", "reduced", "clip"), ("clip",),
       ("state", "reduced", "clip"), ("resident", "state"), None,
       "the same update to the bit, on the device, of a tile that lives there with its state"),
    Op("result", Lane.COMPUTE, ("key", "values"), (), ("values",), (), None, "hands values to the caller"),
    Op("lease", Lane.COMPUTE, ("key", "value"), (), ("value",), (), None, "keeps a value for a later section"),
    Op("leased", Lane.COMPUTE, ("key",), (), (), (), "activation", "a value that an earlier section kept"),
    Op("release", None, ("value",), (), (), ("value",), None, "ends a value's life in its place"),
    Op("record", None, ("node",), (), (), (), "event", "an event on the node's lane, once the node is done"),
    Op("wait", None, ("lane", "event"), (), (), (), None, "the lane goes no further before the event"),
    Op("enter", None, ("place", "access", "lane"), (), (), (), "event",
       "the event of a lane's last access to a place in whatever ran before this section"),
    Op("leave", None, ("place", "access", "event"), (), (), (), None,
       "hands on the event of this section's last access to a place"),
)}

TILE_PARTS = ("weights", "gradients")
#: Families of slots, by the letters of a slot's name ("B" behind them: for border tiles), and what kind of values each
#: holds. R: weights that stay on the device; RW, RS, RG: weights, optimizer state and gradients of a tile that is updated
#: there; S, D: page-locked host slabs for weights on their way out and gradients on their way home.
SLOT_KINDS = {"W": ("weights",), "G": ("reduced",), "S": ("staging",), "D": ("slab",),
              "R": ("weights",), "RW": ("weights", "resident"), "RS": ("state",), "RG": ("gradients", "reduced")}


def op_of(node: fx.Node) -> Op:
    assert isinstance(node.target, Op), f"{node.format_node()} is no op of a schedule"
    return node.target


def argument(node: fx.Node, name: str) -> Any:
    return node.kwargs.get(name)


def operands(node: fx.Node, name: str) -> tuple[fx.Node, ...]:
    """The nodes that a parameter holds: none, one or several."""
    value = node.kwargs.get(name)
    if value is None:
        return ()
    return tuple(v for v in (value if isinstance(value, tuple | list) else (value,)) if isinstance(v, fx.Node))


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
                if part == "weights" and argument(node, "staging") is not None:
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


def place_kind(place: str) -> str | None:
    """"W" for "W0", "host weights" for "weights/layers.0": the family of places that ops treat alike. None: memory of a
    value's own, which no other section knows."""
    if place.startswith("%"):
        return None
    part = place.split("/")[0]
    return f"host {part}" if part in TILE_PARTS else slot_family(place)


def slot_family(slot: str) -> str:
    """"W" for "W0" and "WB0"."""
    return slot.rstrip("0123456789").removesuffix("B")


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
        return self.weight_bytes if kind in ("weights", "staging") else self.gradient_bytes

    def moved_bytes(self, op: Op) -> int:
        """Bytes that a copy moves."""
        if op.name == "offload_norms":
            return 0  # a few
        return self.weight_bytes if op.name == "offload_weights" else self.bytes_of(op.result or "")


@dataclass(frozen=True)
class CallSpec:
    """One use of a template: the prologue, each layer, the epilogue, in order.

    `weightless` lists the variants that read no weights (an embedding's backward needs only indices)."""

    name: str
    role: str  # "prologue", "layer", "epilogue"
    template: str
    tiles: tuple[str, ...]
    weightless: tuple[str, ...] = ()


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

    def text(self, section: str | None = None, *, fold: bool = False) -> str:
        """Python that rebuilds this program (`text.parse`). `fold` folds repeated layers, for reading only."""
        from megacompile import folding
        from megacompile import text as printing
        return folding.fold(self, section) if fold else printing.print_program(self, section)

    def table(self, section: str | None = None) -> str:
        from megacompile import listing
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
        unknown = set(arguments) - set(spec.parameters)
        missing = [p for p in spec.parameters if p not in spec.optional and arguments.get(p) is None]
        assert not unknown and not missing, f"{op}: unknown {sorted(unknown)}, missing {missing}"
        given = {p: arguments[p] for p in spec.parameters if arguments.get(p) is not None}
        node = self.graph.create_node("call_function", spec, (), given, name=name)
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
