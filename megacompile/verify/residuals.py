"""Rule `fetched_back`: residuals that leave the device come back before their backward."""
from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from megacompile.ir.listing import describe
from megacompile.ir.program import Kept, Program, find, op_of, operands
from megacompile.verify.fault import Fault


def fetched_back(program: Program) -> Iterator[Fault]:
    """Each value whose residuals are stashed releases them once, afterwards, and no other value does. No backward reads
    released residuals. Each memory for residuals is filled once, before its backward reads it."""
    gone: dict[Kept, fx.Node] = {}  # what the forward has released -> where
    for graph in program.sections.values():
        released: dict[fx.Node, fx.Node] = {}
        yield from _released(graph, released)
        gone |= {Kept.of(value): node for value, node in released.items()}
    for graph in program.sections.values():
        for node in find(graph, "backward"):
            for value in operands(node, "saved"):
                if op_of(value).name in ("forward_saving", "leased") and Kept.of(value) in gone:
                    yield Fault(f"{describe(node)} reads residuals of {value.name}, which were released",
                                "fetch them, and let it read the memory that they are fetched into", node, hazard=True)
        yield from _filled(graph)


def _released(graph: fx.Graph, released: dict[fx.Node, fx.Node]) -> Iterator[Fault]:
    stashed: dict[fx.Node, fx.Node] = {}
    for node in find(graph, "stash_residuals", "release_residuals"):
        (value,) = operands(node, "value")
        if value in released:
            yield Fault(f"{describe(node)} comes after the residuals of {value.name} were released",
                        "stash them once, and release them once, afterwards", node, released[value], hazard=True)
        elif op_of(node).name == "stash_residuals":
            if op_of(value).name != "forward_saving":
                yield Fault(f"{describe(node)} takes {value.name} of {op_of(value).name}, which keeps no residuals",
                            "give it a forward_saving", node, value)
            stashed[value] = node
        else:
            if value not in stashed:
                yield Fault(f"{describe(node)} releases residuals that are not in host memory", "stash them before", node,
                            value, hazard=True)
            released[value] = node
    for value, node in stashed.items():
        if value not in released:
            yield Fault(f"the residuals of {value.name} are stashed, but stay on the device", "release them", node, value)


def _filled(graph: fx.Graph) -> Iterator[Fault]:
    filled: dict[fx.Node, fx.Node] = {}
    for node in find(graph, "fetch_residuals", "backward"):
        if op_of(node).name == "fetch_residuals":
            (memory,) = operands(node, "memory")
            if memory in filled:
                yield Fault(f"{describe(node)} fills {memory.name} a second time", "fetch each set of residuals once", node,
                            filled[memory], hazard=True)
            filled[memory] = node
        for value in operands(node, "saved"):
            if op_of(value).name == "residual_memory" and value not in filled:
                yield Fault(f"{describe(node)} reads {value.name} before residuals are fetched into it", "fetch them before",
                            node, value, hazard=True)
