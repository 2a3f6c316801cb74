"""Keeps the residuals of the first layers in host memory, where the device has no memory for them and the link has time.

    h1_0 = forward_saving("decoder", "layers.0", mb=0, ...)
    y1_0 = stash_residuals("layers.0", mb=0, value=h1_0)
    ...
    release_residuals(h1_0)                                # their memory is for those of layers.27 now
    h28_0 = forward_saving("decoder", "layers.27", mb=0, ...)
    ...
    g28_0 = backward("decoder", "layers.27", mb=0, saved=h28_0, ...)
    q1_0 = residual_memory("layers.0", mb=0, stashed_residuals=y1_0)
    fetch_residuals("layers.0", mb=0, stashed_residuals=y1_0, memory=q1_0)
    ...
    g1_0 = backward("decoder", "layers.0", mb=0, saved=q1_0, ...)

The device has memory for the residuals of some number of layers, and no more than these are there at any time. In the forward
the last layers take the memory of the first layers' residuals, once those are on the host. In the backward they give it back.
So the memory that a plan needs does not depend on how fast the link is, and copies have most of the forward and of the
backward. They are spread evenly over that time: weights come on the same lane and are needed sooner, and the host's update
shares the host's memory with copies. A layer's outputs, which the next layer's backward reads, are small beside its residuals
and stay on the device.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from torch import fx

from megacompile.ir.plan import Plan
from megacompile.ir.program import Builder, Program, argument, copy_section, differentiated, find, nodes, op_of

name, requires, provides = "host_residuals", "differentiate", "differentiate"

#: The call and the micro-batch that residuals are of.
_Of = tuple[str, int]


def run(program: Program, plan: Plan) -> Program:
    if not plan.residuals_on_host(differentiated(program)):
        return program
    sections = {key: copy_section(graph) for key, graph in program.sections.items()}
    if "train_step" in sections:
        _fetch(program, plan, sections["train_step"], _stash(program, plan, sections["train_step"]))
    if "forward" in sections:
        copies = _stash(program, plan, sections["forward"])
        _fetch(program, plan, sections["backward"], _stashed_before(sections["backward"], copies))
    return program.evolve(sections=sections)


def _stash(program: Program, plan: Plan, graph: fx.Graph) -> dict[_Of, fx.Node]:
    """Copies residuals to the host, and releases them before those that take their memory are made. Returns the copies."""
    build, stack = Builder(graph, name), differentiated(program)
    recomputed, on_host = plan.recomputed(stack), plan.residuals_on_host(stack)
    saving = [layer for layer in stack if layer not in recomputed]
    successors = dict(zip(on_host, saving[len(saving) - len(on_host):], strict=True))
    copies: dict[_Of, fx.Node] = {}
    for wave in range(plan.waves):
        # A forward_saving of a layer that keeps no residuals is a recomputation, and no part of the forward.
        made = {_of(node): node for node in find(graph, "forward", "forward_saving")
                if plan.wave_of(argument(node, "mb")) == wave and argument(node, "call") in stack
                and (op_of(node).name == "forward") == (argument(node, "call") in recomputed)}
        before = [*takewhile(lambda of: of[0] not in successors.values(), made)]
        waiting = [(of, node) for of, node in made.items() if of[0] in on_host]
        for (of, node), after in zip(waiting, _spread(len(waiting), len(before), [*made.values()]), strict=True):
            copies[of] = build.after(after, "stash_residuals", f"y{program.number(of[0])}_{of[1]}", call=of[0], mb=of[1],
                                     value=node)
            build.before(made[successors[of[0]], of[1]], "release_residuals", value=node)
    return copies


def _stashed_before(graph: fx.Graph, copies: dict[_Of, fx.Node]) -> dict[_Of, fx.Node]:
    """What the forward, another section, has copied to the host."""
    build, first = Builder(graph, name), next(nodes(graph))
    return {of: build.before(first, "stashed_residuals", node.name, call=of[0], mb=of[1]) for of, node in copies.items()}


def _fetch(program: Program, plan: Plan, graph: fx.Graph, copies: dict[_Of, fx.Node]) -> None:
    """Copies residuals back, each after a backward that has freed memory for them."""
    build, recomputed = Builder(graph, name), plan.recomputed(differentiated(program))
    for wave in range(plan.waves):
        reading = [node for node in find(graph, "backward") if plan.wave_of(argument(node, "mb")) == wave
                   and argument(node, "call") not in recomputed]
        waiting = [node for node in reading if _of(node) in copies]
        for node, after in zip(waiting, _spread(len(waiting), len(reading) - len(waiting), reading), strict=True):
            (call, mb), source = _of(node), copies[_of(node)]
            memory = build.after(after, "residual_memory", f"q{program.number(call)}_{mb}", call=call, mb=mb,
                                 stashed_residuals=source)
            build.after(memory, "fetch_residuals", call=call, mb=mb, stashed_residuals=source, memory=memory)
            node.kwargs = {**node.kwargs, "saved": memory}


def _of(node: fx.Node) -> _Of:
    return argument(node, "call"), argument(node, "mb")


def _spread(count: int, over: int, among: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """`count` nodes, spread evenly over the first `over` nodes of `among`, or one after the other where these are too few."""
    return (among[max(number, number * over // count)] for number in range(count))
