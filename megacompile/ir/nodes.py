"""The nodes of a section: their arguments, the places that they touch, the lane that runs them, and how passes build them.

A section is a straight line of `torch.fx` nodes over the ops of `ops.py`.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from megacompile.ir.ops import OPS, Access, Lane, Op
from megacompile.ir.places import place_kind, tile_place

#: The parameter of a node that is read instead of a part of a tile, where the node has it.
_INSTEAD = {"weights": "staging", "gradients": "slab"}


def op_of(node: fx.Node) -> Op:
    assert isinstance(node.target, Op), f"{node.format_node()} is not an op of a schedule"
    return node.target


def argument(node: fx.Node, name: str) -> Any:
    return node.kwargs.get(name)


def operands(node: fx.Node, name: str) -> tuple[fx.Node, ...]:
    """The nodes in a parameter of a node: none, one or several."""
    value = node.kwargs.get(name)
    if isinstance(value, fx.Node):
        return (value,)
    return tuple(v for v in value if isinstance(v, fx.Node)) if isinstance(value, (tuple, list)) else ()


@dataclass(frozen=True)
class Kept:
    """The owner of a value: a call and a micro-batch, or a tile. The backward uses it to find what the forward kept."""

    call: str | None = None
    mb: int | None = None
    tile: str | None = None

    @classmethod
    def of(cls, node: fx.Node) -> Kept:
        return cls(argument(node, "call"), argument(node, "mb"), argument(node, "tile"))

    def __str__(self) -> str:
        return f"accumulators {self.tile}" if self.tile is not None else f"{self.call} mb {self.mb}"


def lane_of(node: fx.Node) -> Lane | None:
    """The lane that executes a node; None for a mark that no lane runs. A release of a value's own memory runs in compute,
    which uses that memory. A release of a slot is a mark for the verifier."""
    op = op_of(node)
    if op.name == "wait":
        return Lane(argument(node, "lane"))
    if op.name == "record":
        return lane_of(operands(node, "node")[0])
    if op.name == "release":
        return Lane.COMPUTE if place_kind(place_of(operands(node, "value")[0])) is None else None
    return op.lane


def place_of(node: fx.Node) -> str:
    """The place of a node's value. Before the pass `place` assigns slots, every value has its own memory."""
    if argument(node, "into") is not None:
        return str(argument(node, "into"))
    if op_of(node).home is not None:
        return f"{op_of(node).home}/{argument(node, 'tile')}"
    return f"%{node.name}"


def accesses(node: fx.Node) -> list[tuple[str, Access]]:
    """(place, access) of everything that a node touches, by the rules of its op."""
    op, found = op_of(node), []
    for rules, access in ((op.reads, Access.READ), (op.writes, Access.WRITE)):
        for rule in rules:
            if rule == "result":
                found.append((place_of(node), access))
            elif "[" in rule:
                part, parameter = rule.rstrip("]").split("[")
                if access == Access.READ and argument(node, _INSTEAD.get(part, "")) is not None:
                    continue  # the slab is read instead of the tile
                if (tiles := argument(node, parameter)) is None:
                    continue
                found += [(tile_place(part, t), access) for t in (tiles if isinstance(tiles, tuple | list) else (tiles,))]
            else:
                found += [(place_of(value), access) for value in operands(node, rule)]
    return found


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
        node.kwargs = given  # create_node in torch 2.13 would walk them, which takes longer than everything else here
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


def results_of(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Maps each value that a section returns to the node that returns it."""
    return {value: node for node in find(graph, "result") for value in operands(node, "values")}


def copy_section(graph: fx.Graph) -> fx.Graph:
    """A copy with the same node names and provenance, which a pass may rewrite."""
    return rebuild(graph, lambda node, arguments, build: build.add(op_of(node).name, node.name, **arguments))


def rebuild(graph: fx.Graph, visit: Callable[[fx.Node, dict[str, Any], Builder], fx.Node | None],
            source: str = "") -> fx.Graph:
    """A new section. Visits each node in program order, with the node's arguments mapped into the new graph. `visit` adds the
    nodes that replace it, and returns the node that its users should read."""
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
    """The users of a value in program order. (`fx.Node.users` has them in the order in which they were added.)"""
    return [n for n in nodes(graph) if value in n.all_input_nodes]


def places(graphs: Iterable[fx.Graph]) -> set[str]:
    return {place for graph in graphs for node in nodes(graph) for place, _ in accesses(node)}
