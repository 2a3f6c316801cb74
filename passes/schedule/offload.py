"""Copies gradients to the host, each tile's as soon as the last micro-batch has added to it.

    g5 = reduce("layers.5", a5)                            # FP32 accumulators -> link precision, and norms
    d5 = offload("layers.5", g5)                           # straight into the pinned tile
    accumulate("layers.5", d5, overwrite=False)            # or through a slab: if tiles are not pinned, and in
                                                           # `backward_accumulate`, which adds to existing gradients

If the plan updates on arrival, gradients go to a slab, where the update reads them.

A tile whose optimizer state lives on the device keeps its gradients there. A whole step copies only their norms to the host.
Where the host adds gradients up, the sums are copied back:

    g0 = fetch_gradients("layers.0")

With several ranks each tile is reduced after the last contribution to the next one, so that ranks add up accumulators during
the next tile's backward.

A tile that the device holds for its update stays there too, with the weights of its last backward. Its optimizer state follows
once the section has fetched all weights, last backward first:

    e5 = hold("layers.5", d5, current=w5)
    fetch_held("layers.5", e5)

Where waves are added up on the host:

    offload("layers.5", d5)
    add_to_sum("layers.5", overwrite=False)                # overwrite=True in the first wave
    norms_of_sum("layers.5")                               # after the last wave, for the clip
"""
from __future__ import annotations

from itertools import pairwise

from torch import fx

from megacompile.ir.placement import Updated
from megacompile.ir.plan import Plan
from megacompile.ir.program import Builder, Lane, Program, argument, copy_section, find, nodes, op_of, operands, results_of

name, requires, provides = "offload", "prefetch", "offload"


def run(program: Program, plan: Plan) -> Program:
    sections = dict(program.sections)
    for key in ("backward", "train_step"):
        if key in sections:
            sections[key] = _insert(program, plan, key, slabs=not plan.pinned or plan.update == "arrival", overwrite=True)
    if "backward" in sections:
        sections["backward_accumulate"] = _insert(program, plan, "backward", slabs=True, overwrite=False)
    return program.evolve(stage=provides, sections=sections)


def _insert(program: Program, plan: Plan, section: str, slabs: bool, overwrite: bool) -> fx.Graph:
    graph = copy_section(program.section(section))
    build = Builder(graph, name)
    accumulators = [node for node in find(graph, "zeros", "leased") if argument(node, "tile") is not None]
    anchors = _anchors(graph, accumulators, plan)
    for value in accumulators:
        tile: str = argument(value, "tile")
        number = program.number(tile)
        reduced = build.after(anchors[value], "reduce", f"d{number}", tile=tile, accumulators=value)
        updated = plan.placement(tile).updated
        stays = updated is Updated.ON_DEVICE
        if stays and plan.update == "arrival":
            continue  # the update on the device consumes them
        if stays and section == "train_step":
            build.after(reduced, "offload_norms", tile=tile, reduced=reduced)
            continue
        sent = build.after(reduced, "offload", f"o{number}", tile=tile, reduced=reduced, into=None)
        if updated is Updated.FROM_HOST_SUMS and section == "train_step":
            waves = [other for other in accumulators if argument(other, "tile") == tile]
            added = build.after(sent, "add_to_sum", tile=tile, slab=sent if slabs else None, overwrite=value is waves[0])
            if value is waves[-1] and plan.update == "step":
                build.after(added, "norms_of_sum", tile=tile)
            continue
        if updated is Updated.HELD and section == "train_step":
            current = next((each for each in operands(anchors[value], "weights") if argument(each, "tile") == tile), None)
            build.after(sent, "hold", f"v{number}", tile=tile, reduced=reduced, current=current)
        if slabs and not (plan.update == "arrival" and overwrite):
            added = build.after(sent, "accumulate", tile=tile, slab=sent, overwrite=overwrite)
            if stays and not overwrite:
                build.after(added, "fetch_gradients", f"g{number}", tile=tile)
    last = None
    for node in nodes(graph):
        last = node if op_of(node).lane is Lane.H2D else last
    held = list(find(graph, "hold"))
    for node in reversed(held):  # each goes in front of those that are held later
        after = node if last is None or last < node else last
        build.after(after, "fetch_held", tile=argument(node, "tile"), held=node)
    return graph


def _anchors(graph: fx.Graph, accumulators: list[fx.Node], plan: Plan) -> dict[fx.Node, fx.Node]:
    """The node after which each of the accumulators is reduced."""
    last: dict[fx.Node, fx.Node] = {}
    position: dict[fx.Node, int] = {}
    for number, node in enumerate(nodes(graph)):
        position[node] = number
        for value in (*operands(node, "accumulators"), *operands(node, "value")):
            last[value] = node
    if plan.processes == 1:
        return last
    ends = sorted({last[value] for value in accumulators}, key=position.__getitem__)
    following = {end: after for end, after in pairwise(ends) if _wave(end, plan) == _wave(after, plan)}
    # Where a wave has no later contribution than its loss, the ranks share that first, and then add up the gradients.
    returned = results_of(graph)
    return {value: following.get(last[value], returned.get(last[value], last[value])) for value in accumulators}


def _wave(node: fx.Node, plan: Plan) -> int:
    return plan.wave_of(argument(node, "mb") or 0)
