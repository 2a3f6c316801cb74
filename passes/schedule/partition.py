"""Cuts the stack into blocks of K layers: the input of each block is an activation checkpoint, kept until the backward.

    h4_0 = forward("decoder", "layers.3", mb=0)
    lease(h4_0)                                            # layers.4 begins a block
    ...
    h9_0 = forward_saving("decoder", "layers.8", mb=0)     # a layer whose residuals the plan keeps
    lease(h9_0)

The prologue's outputs are kept too. Layers below the first call that trains anything have no backward: nothing of them is
kept. A checkpoint that the plan keeps in host memory is copied there as soon as it is made:

    x4_0 = stash("layers.3", mb=0, value=h4_0)
"""
from __future__ import annotations

from typing import Any

from torch import fx

from megacompile.ir.plan import Plan
from megacompile.ir.program import Builder, Program, argument, differentiated, gives_outputs, op_of, rebuild

name, requires, provides = "partition", "micro_batch", "partition"


#: Sections that keep what a backward needs.
TRAINING = ("forward", "train_step")


def run(program: Program, plan: Plan) -> Program:
    stack = differentiated(program)
    saved = set(stack).difference(plan.recomputed(stack))
    begins = {block[0] for block in plan.blocks(stack)} | saved
    chain = [c.name for c in program.calls]
    on_host = {chain[chain.index(layer) - 1] for layer in plan.from_host(stack)}
    feeds = {chain[chain.index(layer) - 1] for layer in begins} | saved | set(chain[:1] if stack else ())  # outputs are kept
    if gives_outputs(program):
        feeds |= {chain[0], chain[-2]}

    def visit(node: fx.Node, arguments: dict[str, Any], build: Builder) -> fx.Node:
        op = op_of(node).name
        call = argument(node, "call")
        made = build.add("forward_saving" if op == "forward" and call in saved else op, node.name, **arguments)
        if op == "forward" and call in on_host:
            mb = argument(node, "mb")
            build.add("stash", f"x{program.number(call)}_{mb}", call=call, mb=mb, value=made)
        elif op == "forward" and call in feeds:
            build.add("lease", value=made)
        return made

    return program.evolve(stage=provides, sections={
        key: rebuild(graph, visit, name) if key in TRAINING else graph for key, graph in program.sections.items()})
