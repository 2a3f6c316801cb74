"""Sends gradients home, each tile as soon as its last micro-batch has added to it.

    g5 = reduce("layers.5", a5)                            # FP32 accumulators -> link precision, and norms
    d5 = offload("layers.5", g5)                           # straight into the page-locked tile
    accumulate("layers.5", d5, overwrite=False)            # or through a slab: where tiles are not page-locked, and in
                                                           # `backward_accumulate`, which adds to gradients that exist
"""
from __future__ import annotations

from torch import fx

from megacompile.plan import Plan
from megacompile.program import Builder, Program, argument, copy_section, find, nodes, operands

name, requires, provides = "offload", "prefetch", "offload"


def run(program: Program, plan: Plan) -> Program:
    sections = dict(program.sections)
    for key in ("backward", "train_step"):
        if key in sections:
            sections[key] = _insert(program, copy_section(program.section(key)), slabs=not plan.locked, overwrite=True)
    if "backward" in sections:
        backward = copy_section(program.section("backward"))
        sections["backward_accumulate"] = _insert(program, backward, slabs=True, overwrite=False)
    return program.evolve(stage=provides, sections=sections)


def _tile_of(accumulators: fx.Node) -> str:
    return str(argument(accumulators, "tile") or argument(accumulators, "key").removeprefix("accumulators "))


def _insert(program: Program, graph: fx.Graph, slabs: bool, overwrite: bool) -> fx.Graph:
    build = Builder(graph, name)
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes(graph):
        for value in (*operands(node, "accumulators"), *operands(node, "value")):
            last[value] = node
    accumulators = [n for n in find(graph, "zeros", "leased")
                    if argument(n, "tile") or argument(n, "key").startswith("accumulators ")]
    for value in accumulators:
        tile = _tile_of(value)
        reduced = build.after(last[value], "reduce", f"d{program.number(tile)}", tile=tile, accumulators=value)
        sent = build.after(reduced, "offload", f"o{program.number(tile)}", tile=tile, reduced=reduced, into=None)
        if slabs:
            build.after(sent, "accumulate", tile=tile, slab=sent, overwrite=overwrite)
    return graph
