"""Shares each tile's traffic between ranks: each rank copies and updates its shard, and the ranks exchange shards.

    s3 = prefetch_shard("layers.3")                        # h2d: 1/N of the tile
    w3 = gather("layers.3", s3)                            # collective
    h4_0 = forward("decoder", "layers.3", mb=0, weights=(w3,))

Gradients are added up in FP32 over the ranks. Each rank keeps its shard of the sum:

    reduce_scatter("layers.3", a3)                         # collective, beside the backward of layers.2
    d3 = reduce("layers.3", a3)                            # after it: of this rank's shard
    share_norms("layers.3", d3)                            # collective: each parameter's norm over all shards
    offload("layers.3", d3)

Where the host adds gradients up, norms are shared after that (`share_host_norms`). A tile that is updated on the device has a
shard of its state, and all of its weights, on each device:

    update_on_device("layers.3", resident=w3, state=m3, reduced=d3, clip=c)
    gather_resident("layers.3", w3)

The update of matrices reads the momentum of whole ones:

    n5 = momentum("layers.5", c, into="N0")                # h2d: of this rank's shard
    gather_momentum("layers.5", n5)                        # collective
    v5 = update_visiting("layers.5", c, n5, into="V0")     # of this rank's shard

After the last update, and the last write to the disk, a rank says so:

    announce(("layers.0", "layers.1", ...), on_disk=("layers.1", ...))

The loss is that of all ranks' rows:

    l = total_loss((l_0, l_1))
    share_loss(l)                                          # collective, before the sums of gradients
    result("loss", (l,))                                   # in a whole step after the next backward

With several copies, the ranks with the same shard add up its sum, in the same lane:

    reduce_scatter("layers.3", a3)                         # over the ranks of a copy
    all_reduce("layers.3", a3)                             # over the copies: of this rank's shard
    d3 = reduce("layers.3", a3)

With one rank per copy only `all_reduce` and `share_loss` are added. In evaluations and `load` each rank copies whole tiles, so
that it can evaluate alone, unless a copy is divided among hosts: then all ranks evaluate together, and gather tiles.
"""
from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import fx

from megacompile.ir.ops import UPDATE_OPS
from megacompile.ir.plan import Plan
from megacompile.ir.program import (
    Builder,
    Program,
    argument,
    find,
    nodes,
    op_of,
    operands,
    rebuild,
    results_of,
    sections_of_all_ranks,
)

name, requires, provides = "shard", "optimizer", "shard"

_BACKWARDS = ("backward", "recompute_backward")


def run(program: Program, plan: Plan) -> Program:
    if plan.processes == 1:
        return program.evolve(stage=provides)
    whole = {name for name, tile in program.tiles.items() if tile.visit_bytes}
    sections = {key: _shard(graph, plan, whole) if key in sections_of_all_ranks(plan.spread) else graph
                for key, graph in program.sections.items()}
    for graph in sections.values() if plan.ranks > 1 else ():
        if updated := tuple(dict.fromkeys(argument(node, "tile") for node in find(graph, *UPDATE_OPS))):
            written = tuple(argument(node, "tile") for node in find(graph, "write_state"))
            Builder(graph, name).add("announce", tiles=updated, on_disk=written or None)
    return program.evolve(stage=provides, ranks=plan.ranks, hosts=plan.hosts, spread=plan.spread, sections=sections)


def _shard(graph: fx.Graph, plan: Plan, whole: Collection[str]) -> fx.Graph:
    """`whole`: the tiles with matrices that are updated whole."""
    complete: dict[fx.Node, list[fx.Node]] = {}  # last contribution -> the accumulators that are complete after it
    returned = results_of(graph)
    backwards = [*find(graph, *_BACKWARDS)]
    last = {value: node for node in nodes(graph) for value in (*operands(node, "accumulators"), *operands(node, "value"))
            if op_of(node).name != "reduce"}
    for node in find(graph, "reduce"):
        (value,) = operands(node, "accumulators")
        contribution = last.get(value, value)
        complete.setdefault(returned.get(contribution, contribution), []).append(value)
    exchanges = [*(["reduce_scatter"] if plan.ranks > 1 else []), *(["all_reduce"] if plan.hosts > 1 else [])]
    image: dict[fx.Node, fx.Node] = {}
    waiting: list[fx.Node] = []  # a wave's loss that is not returned yet

    def visit(node: fx.Node, arguments: dict[str, Any], build: Builder) -> fx.Node:
        made = image[node] = _replaced(node, arguments, build, plan.ranks, whole)
        if op_of(made).name == "total_loss":
            waiting.append(made)
        if waiting and (op_of(node).name in _BACKWARDS or not backwards or node > backwards[-1]):
            build.add("result", key="loss", values=(waiting.pop(),))
        for value in complete.get(node, ()):
            for exchange in exchanges:
                build.add(exchange, tile=argument(value, "tile"), accumulators=image[value])
        return made

    return rebuild(graph, visit, name)


def _replaced(node: fx.Node, arguments: dict[str, Any], build: Builder, ranks: int, whole: Collection[str]) -> fx.Node:
    """Adds the nodes that replace a node when there are several processes, `ranks` of them on each host. Returns the node that
    its users read."""
    op, tile = op_of(node).name, arguments.get("tile")

    def again(op: str = op) -> fx.Node:
        made = build.add(op, node.name, **arguments)
        made.meta["pass"] = node.meta.get("pass", "")
        return made

    if op == "result" and all(op_of(value).name == "loss" for value in operands(node, "values")):
        total = build.add("total_loss", "l", values=arguments["values"])
        build.add("share_loss", value=total)
        return total
    if ranks == 1:
        return again()
    match op:
        case "pack":
            return build.add("pack_shard", node.name, **arguments)
        case "prefetch":
            shard = build.add("prefetch_shard", f"s{node.name.lstrip('w')}", tile=tile, staging=arguments.get("staging"))
            return build.add("gather", node.name, tile=tile, shard=shard)
        case "reduce":
            reduced = again()
            build.add("share_norms", tile=tile, reduced=reduced)
            return reduced
        case "accumulate" if not arguments["overwrite"]:
            made = again()
            build.add("share_host_norms", tile=tile)
            return made
        case "norms_of_sum":
            made = again()
            build.add("share_host_norms", tile=tile)
            return made
        case "update_visiting" if tile in whole:
            momentum = build.add("momentum", f"n{node.name.lstrip('v')}", tile=tile, clip=arguments["clip"])
            build.add("gather_momentum", tile=tile, momentum=momentum)
            return build.add(op, node.name, **arguments, momentum=momentum)
        case "update_on_device":
            made = again()
            build.add("gather_resident", tile=tile, resident=arguments["resident"])
            return made
    return again()
