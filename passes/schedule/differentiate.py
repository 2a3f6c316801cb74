"""Adds the backward: blocks in reverse, and in each block every micro-batch by itself.

    x_0 = leased("h4_0")                                              # the block's checkpoint
    r0_0 = forward_saving("decoder", "layers.4", mb=0, ...)           # all layers of the block but the last
    g6_0 = recompute_backward("decoder", "layers.5", mb=0, ...)       # the last: its forward and backward in one graph
    g5_0 = backward("decoder", "layers.4", mb=0, saved=r0_0, ...)

Two forwards and one backward of each layer in all, never three forwards, and the last layer of a block drops what its
backward does not need. With K = 1 every layer is a last one. The epilogue's gradients are made with the loss, in the
forward, for a unit loss (the paper's loss anchoring); the backward begins by scaling them with what the caller sends.
"""
from __future__ import annotations

from typing import Any

from torch import fx

from megacompile.plan import Plan
from megacompile.program import Builder, CallSpec, Program, argument, find, op_of, rebuild

from .partition import layers

name, requires, provides = "differentiate", "partition", "differentiate"


def run(program: Program, plan: Plan) -> Program:
    if "forward" not in program.sections:
        return program.evolve(stage=provides)
    forward = _anchor_loss(program)
    backward = _Backward(program, plan, forward).graph
    return program.evolve(stage=provides, sections={**program.sections, "forward": forward, "backward": backward})


def trainable(program: Program, call: CallSpec) -> tuple[str, ...]:
    return tuple(t for t in call.tiles if program.tiles[t].trainable)


def accumulators_key(tile: str) -> str:
    return f"accumulators {tile}"


def _anchor_loss(program: Program) -> fx.Graph:
    """The forward, whose loss also accumulates the epilogue's gradients and keeps them for the backward."""
    epilogue = program.calls[-1]
    accumulators: list[fx.Node] = []

    def visit(node: fx.Node, arguments: dict[str, Any], build: Builder) -> fx.Node:
        if op_of(node).name != "loss":
            return build.add(op_of(node).name, node.name, **arguments)
        if not accumulators:
            accumulators.extend(build.add("zeros", f"a{program.number(tile)}", tile=tile)
                                for tile in trainable(program, epilogue))
        made = build.add("loss", node.name, **arguments, accumulators=tuple(accumulators) or None)
        build.add("lease", key=node.name, value=made)
        return made

    forward = rebuild(program.section("forward"), visit, name)
    build = Builder(forward, name)
    for tile, node in zip(trainable(program, epilogue), accumulators, strict=True):
        build.add("lease", key=accumulators_key(tile), value=node)
    return forward


class _Backward:
    """Writes the section `backward`. State: the gradient of each micro-batch, the accumulators that exist, the leases."""

    def __init__(self, program: Program, plan: Plan, forward: fx.Graph) -> None:
        self.program, self.plan = program, plan
        self.calls = {c.name: c for c in program.calls}
        self.graph = fx.Graph()
        self.build = Builder(self.graph, name)
        self.kept = {argument(n, "key") for n in find(forward, "lease")}
        self.outputs = {(argument(n, "call"), argument(n, "mb")): n.name
                        for n in find(forward, "forward", "forward_saving", "loss")}
        self.leases: dict[str, fx.Node] = {}
        self.accumulators: dict[str, fx.Node] = {}
        self.micro_batches = range(len(plan.micro_batches))
        self.chain = [c.name for c in program.calls]

        epilogue = program.calls[-1]
        self.gradients = [self.leased(self.outputs[epilogue.name, mb]) for mb in self.micro_batches]
        for value in [*self.gradients, *self.accumulators_of(epilogue)]:
            self.build.add("scale", value=value)

        stack = layers(program)
        blocks = plan.blocks(stack)
        for layer in reversed(stack[sum(map(len, blocks)):]):
            for mb in self.micro_batches:
                saved = self.leased(self.outputs[layer, mb])
                self.step("backward", layer, mb, self.leased(self.input_of(layer, mb)), saved=saved)
        for block in reversed(blocks):
            for mb in self.micro_batches:
                self.block(block, mb)
        if trainable(program, program.calls[0]):
            for mb in self.micro_batches:
                self.step("recompute_backward", self.chain[0], mb, None)

    def input_of(self, call: str, mb: int) -> str:
        return self.outputs[self.chain[self.chain.index(call) - 1], mb]

    def leased(self, key: str, name: str | None = None) -> fx.Node:
        if key not in self.leases:
            assert key in self.kept, f"the forward keeps no {key}"
            self.leases[key] = self.build.add("leased", name or key, key=key)
        return self.leases[key]

    def accumulators_of(self, call: CallSpec) -> list[fx.Node]:
        for tile in trainable(self.program, call):
            if tile not in self.accumulators:
                key = accumulators_key(tile)
                label = f"a{self.program.number(tile)}"
                self.accumulators[tile] = (
                    self.leased(key, label) if key in self.kept else self.build.add("zeros", label, tile=tile))
        return [self.accumulators[tile] for tile in trainable(self.program, call)]

    def inputs(self, mb: int, carried: fx.Node) -> tuple[fx.Node, ...]:
        return carried, self.leased(self.outputs[self.chain[0], mb])

    def block(self, block: tuple[str, ...], mb: int) -> None:
        carried = [self.leased(self.input_of(block[0], mb))]
        for layer in block[:-1]:
            carried.append(self.build.add(
                "forward_saving", f"r{self.program.number(layer)}_{mb}", template=self.calls[layer].template, call=layer, mb=mb,
                inputs=self.inputs(mb, carried[-1])))
        self.step("recompute_backward", block[-1], mb, carried[-1])
        for layer, value, saved in zip(reversed(block[:-1]), reversed(carried[:-1]), reversed(carried[1:]), strict=True):
            self.step("backward", layer, mb, value, saved=saved)

    def step(self, op: str, layer: str, mb: int, carried: fx.Node | None, **more: Any) -> None:
        call = self.calls[layer]
        accumulators = tuple(self.accumulators_of(call)) or None
        self.gradients[mb] = self.build.add(
            op, f"g{self.program.number(layer)}_{mb}", template=call.template, call=layer, mb=mb,
            inputs=() if carried is None else self.inputs(mb, carried),
            gradient=self.gradients[mb], accumulators=accumulators, **more)
