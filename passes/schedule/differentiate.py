"""Adds the backward: blocks in reverse order, and in each block one micro-batch after the other.

    x_0 = leased("layers.3", mb=0)                                    # the block's checkpoint
    r0_0 = forward_saving("decoder", "layers.4", mb=0, ...)           # all layers of the block but the last
    g6_0 = recompute_backward("decoder", "layers.5", mb=0, ...)       # the last: its forward and backward in one graph
    g5_0 = backward("decoder", "layers.4", mb=0, saved=r0_0, ...)

With K = 1 every layer is the last of its block. The backward ends at the first call that trains anything. The forward computes
the epilogue's gradients for a unit loss; the backward begins by scaling them with the gradient of the caller's loss.

If the caller gets the epilogue's outputs, the epilogue is a block by itself, whose gradient comes from the caller:

    t_0 = output_gradient("epilogue", mb=0)
    g7_0 = recompute_backward("head", "epilogue", mb=0, inputs=(h6_0, s_0), gradient=t_0)
"""
from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import fx

from megacompile.ir.plan import Plan
from megacompile.ir.program import (
    Builder,
    CallSpec,
    Kept,
    Program,
    argument,
    differentiated,
    find,
    gives_outputs,
    nodes,
    op_of,
    operands,
    rebuild,
    trainable,
)

name, requires, provides = "differentiate", "partition", "differentiate"


def run(program: Program, plan: Plan) -> Program:
    sections = dict(program.sections)
    if "forward" in sections:
        if not gives_outputs(program):
            sections["forward"] = _anchor_loss(program, sections["forward"])
        sections["backward"] = _leased_backward(program, plan, sections["forward"])
    if "train_step" in sections:
        sections["train_step"] = _whole_step(program, plan, _anchor_loss(program, sections["train_step"]))
    return program.evolve(stage=provides, sections=sections)


def _anchor_loss(program: Program, section: fx.Graph) -> fx.Graph:
    """The forward. Its loss also accumulates the epilogue's gradients and keeps them for the backward."""
    epilogue = program.calls[-1]
    accumulators: list[fx.Node] = []

    def visit(node: fx.Node, arguments: dict[str, Any], build: Builder) -> fx.Node:
        if op_of(node).name != "loss":
            return build.add(op_of(node).name, node.name, **arguments)
        if not accumulators:
            accumulators.extend(build.add("zeros", f"a{program.number(tile)}", tile=tile)
                                for tile in trainable(program, epilogue.tiles))
        made = build.add("loss", node.name, **arguments, accumulators=tuple(accumulators) or None)
        build.add("lease", value=made)
        return made

    forward = rebuild(section, visit, name)
    build = Builder(forward, name)
    for node in accumulators:
        build.add("lease", value=node)
    return forward


def _leased_backward(program: Program, plan: Plan, forward: fx.Graph) -> fx.Graph:
    """The section `backward`. It takes what `forward` kept, and scales gradients by the gradient of the caller's loss."""
    graph = fx.Graph()
    build = Builder(graph, name)
    kept = {Kept.of(value): value for lease in find(forward, "lease") for value in operands(lease, "value")}
    leases: dict[Kept, fx.Node] = {}
    for stash in find(forward, "stash"):  # at the top, so that `prefetch` can fetch them early
        leases[Kept.of(stash)] = build.add("stashed", stash.name, call=argument(stash, "call"), mb=argument(stash, "mb"))

    def leased(what: Kept) -> fx.Node:
        if what not in leases:
            leases[what] = build.add("leased", kept[what].name, call=what.call, mb=what.mb, tile=what.tile)
        return leases[what]

    backward = _Backward(program, plan, build, leased, set(kept))
    micro_batches = list(range(len(plan.micro_batches)))
    if gives_outputs(program):
        backward.receive(micro_batches)
    else:
        for value in backward.begin(micro_batches):
            build.add("scale", value=value)
    backward.run(micro_batches)
    return graph


def _whole_step(program: Program, plan: Plan, forward: fx.Graph) -> fx.Graph:
    """The section `train_step`: forward and backward of one wave of micro-batches, then of the next. Accumulators live until
    the last wave has added to them; accumulators of tiles whose sums are on the host live for one wave. Nothing is leased, and
    the loss is not scaled."""
    graph = fx.Graph()
    build = Builder(graph, name)
    image: dict[fx.Node, fx.Node] = {}
    kept: dict[Kept, fx.Node] = {}
    ever = {Kept.of(value) for lease in find(forward, "lease") for value in operands(lease, "value")}
    backward = _Backward(program, plan, build, kept.__getitem__, ever)
    of_one_wave = set(plan.host_sums)
    for wave in range(plan.waves):
        backward.accumulators = {tile: node for tile, node in backward.accumulators.items() if tile not in of_one_wave}
        for node in nodes(forward):
            op, mb = op_of(node).name, argument(node, "mb")
            if op == "lease":
                if (value := operands(node, "value")[0]) in image:
                    kept[Kept.of(value)] = image[value]
            elif (plan.wave_of(mb) == wave if mb is not None else
                  op == "zeros" and (node not in image or argument(node, "tile") in of_one_wave)):
                arguments = {k: fx.map_arg(v, lambda n: image[n]) for k, v in node.kwargs.items()}
                image[node] = build.add(op, node.name, **arguments)
                if op == "stash":
                    kept[Kept.of(node)] = image[node]
        losses = tuple(image[n] for n in find(forward, "loss") if plan.wave_of(argument(n, "mb")) == wave)
        build.add("result", key="loss", values=losses)
        backward.begin(plan.wave(wave))
        backward.run(plan.wave(wave))
    return graph


class _Backward:
    """Writes the backward of some micro-batches. State: the current gradient of each micro-batch, and the accumulators made so
    far.

    `kept(what)` is the node of a value that the forward keeps; `ever` holds all such values."""

    def __init__(self, program: Program, plan: Plan, build: Builder, kept: Callable[[Kept], fx.Node],
                 ever: Collection[Kept]) -> None:
        self.program, self.plan, self.build, self.kept, self.ever = program, plan, build, kept, ever
        self.calls = {c.name: c for c in program.calls}
        self.chain = [c.name for c in program.calls]
        self.accumulators: dict[str, fx.Node] = {}
        self.gradients: dict[int, fx.Node] = {}

    def begin(self, micro_batches: list[int]) -> list[fx.Node]:
        """Takes the gradients that the loss made: of its input, and in its accumulators."""
        epilogue = self.program.calls[-1]
        self.gradients = {mb: self.kept(Kept(epilogue.name, mb)) for mb in micro_batches}
        return [*self.gradients.values(), *self.accumulators_of(epilogue)]

    def receive(self, micro_batches: list[int]) -> None:
        """Adds the gradients that the caller sends, and the epilogue's backward."""
        epilogue = self.chain[-1]
        for mb in micro_batches:
            self.gradients[mb] = self.build.add("output_gradient", f"t_{mb}", call=epilogue, mb=mb)
            self.step("recompute_backward", epilogue, mb, self.kept(self.input_of(epilogue, mb)))

    def run(self, micro_batches: list[int]) -> None:
        stack = differentiated(self.program)
        block_of = {layer: block for block in self.plan.blocks(stack) for layer in block}
        parts = [*dict.fromkeys(block_of.get(layer, (layer,)) for layer in stack)]
        for part in reversed(parts):
            for mb in micro_batches:
                (self.block if part[0] in block_of else self.saved)(part, mb)
        if trainable(self.program, self.program.calls[0].tiles):
            for mb in micro_batches:
                self.step("recompute_backward", self.chain[0], mb, None)

    def input_of(self, call: str, mb: int) -> Kept:
        return Kept(self.chain[self.chain.index(call) - 1], mb)

    def accumulators_of(self, call: CallSpec) -> list[fx.Node]:
        for tile in trainable(self.program, call.tiles):
            if tile not in self.accumulators:
                self.accumulators[tile] = (self.kept(Kept(tile=tile)) if Kept(tile=tile) in self.ever else
                                           self.build.add("zeros", f"a{self.program.number(tile)}", tile=tile))
        return [self.accumulators[tile] for tile in trainable(self.program, call.tiles)]

    def inputs(self, mb: int, carried: fx.Node) -> tuple[fx.Node, ...]:
        return carried, self.kept(Kept(self.chain[0], mb))

    def block(self, block: tuple[str, ...], mb: int) -> None:
        carried = [self.kept(self.input_of(block[0], mb))]
        for layer in block[:-1]:
            carried.append(self.build.add(
                "forward_saving", f"r{self.program.number(layer)}_{mb}", template=self.calls[layer].template, call=layer, mb=mb,
                inputs=self.inputs(mb, carried[-1])))
        self.step("recompute_backward", block[-1], mb, carried[-1])
        for layer, value, saved in zip(reversed(block[:-1]), reversed(carried[:-1]), reversed(carried[1:]), strict=True):
            self.step("backward", layer, mb, value, saved=saved)

    def saved(self, layers: tuple[str, ...], mb: int) -> None:
        """Adds the backward of a layer that kept its residuals."""
        (layer,) = layers
        self.step("backward", layer, mb, self.kept(self.input_of(layer, mb)), saved=self.kept(Kept(layer, mb)))

    def step(self, op: str, layer: str, mb: int, carried: fx.Node | None, **more: Any) -> None:
        call = self.calls[layer]
        accumulators = tuple(self.accumulators_of(call)) or None
        self.gradients[mb] = self.build.add(
            op, f"g{self.program.number(layer)}_{mb}", template=call.template, call=layer, mb=mb,
            inputs=() if carried is None else self.inputs(mb, carried),
            gradient=self.gradients[mb], accumulators=accumulators, **more)
