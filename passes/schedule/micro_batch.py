"""Splits the batch within each layer: weights arrive once in a section, and all micro-batches use them."""
from __future__ import annotations

from torch import fx

from megacompile.ir.plan import Plan
from megacompile.ir.program import Builder, Program, argument, nodes, op_of

name, requires, provides = "micro_batch", "model", "micro_batch"


def run(program: Program, plan: Plan) -> Program:
    sections = {key: _split(graph, len(plan.micro_batches)) for key, graph in program.sections.items()}
    return program.evolve(stage=provides, micro_batches=plan.micro_batches, sections=sections)


def _split(graph: fx.Graph, count: int) -> fx.Graph:
    new = fx.Graph()
    build = Builder(new, name)
    parts: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes(graph):
        if op_of(node).name == "result":
            values = tuple(part for value in argument(node, "values") for part in parts[value])
            build.add("result", key=argument(node, "key"), values=values)
            continue
        parts[node] = [
            build.add(op_of(node).name, f"{node.name}_{mb}", template=argument(node, "template"),
                      call=argument(node, "call"), mb=mb, inputs=tuple(parts[v][mb] for v in argument(node, "inputs")))
            for mb in range(count)]
    return new
