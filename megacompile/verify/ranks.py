"""Rule `together`: what several ranks run together is complete, and in the same order on every rank.

All ranks, of one host or of several, run one program, and its collectives run in one lane, in program order. So every rank runs
the same sequence. The rule says that each exchange happens once and in time: a weight slot holds all shards before it is
read, a gradient is the sum over all ranks and hosts before it is rounded, and a norm is that of the whole gradient before
anything reads it.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from megacompile.ir.ops import UPDATE_OPS
from megacompile.ir.printing import describe
from megacompile.ir.program import Program, argument, find, nodes, op_of, operands
from megacompile.verify.fault import Fault

#: Exchanges of the ranks of a host, of hosts, and of both.
_OF_RANKS = ("pack_shard", "prefetch_shard", "gather", "reduce_scatter", "share_norms", "share_host_norms", "gather_resident",
             "momentum", "gather_momentum", "announce")
_OF_HOSTS = ("all_reduce",)
_OF_SEVERAL = (*_OF_RANKS, *_OF_HOSTS, "total_loss", "share_loss")
#: Over what an op adds up accumulators, for messages.
_OVER = {"reduce_scatter": "ranks", "all_reduce": "hosts"}


def together(program: Program) -> Iterator[Fault]:
    """With several ranks, all shards of a tile are gathered. Gradients are added up over the ranks once, before they are
    reduced, and then over the hosts once. Norms and losses are exchanged before they are read. A program of one process
    exchanges nothing."""
    for name, graph in program.sections.items():
        if program.processes == 1 or name not in program.together:
            for node in find(graph, *_OF_SEVERAL):
                why = "has one rank" if program.processes == 1 else f"runs {name} on each rank alone"
                yield Fault(f"{describe(node)} exchanges values between ranks, but the program {why}", "drop it", node)
            continue
        for node in find(graph, *(_OF_HOSTS if program.hosts == 1 else ()), *(_OF_RANKS if program.ranks == 1 else ())):
            between, one = ("hosts", "has one host") if op_of(node).name in _OF_HOSTS else (
                "the ranks of a host", "has one rank on each host")
            yield Fault(f"{describe(node)} exchanges values between {between}, but the program {one}", "drop it", node)
        yield from _summed(graph, [*(["reduce_scatter"] if program.ranks > 1 else []),
                                   *(["all_reduce"] if program.hosts > 1 else [])])
        yield from _losses(graph)
        if program.ranks > 1:
            yield from _of_ranks(program, graph)


def _of_ranks(program: Program, graph: fx.Graph) -> Iterator[Fault]:
    for node in find(graph, "pack", "prefetch"):
        yield Fault(f"{describe(node)} copies a whole tile, whose other shards other ranks may be updating",
                    f"{op_of(node).name}_shard and gather", node)
    yield from _gathered(graph)
    yield from _norms(graph)
    yield from _resident(graph)
    yield from _matrices(program, graph)
    yield from _announced(graph)


def _gathered(graph: fx.Graph) -> Iterator[Fault]:
    gathered: dict[fx.Node, fx.Node] = {}
    for node in find(graph, "gather"):
        (shard,) = operands(node, "shard")
        if shard in gathered:
            yield Fault(f"{describe(node)} gathers {shard.name} a second time", "gather each shard once", node, gathered[shard])
        gathered[shard] = node
    for shard in find(graph, "prefetch_shard"):
        if shard not in gathered:
            yield Fault(f"{describe(shard)} is never gathered", "gather it", shard)


def _summed(graph: fx.Graph, exchanges: Sequence[str]) -> Iterator[Fault]:
    """Checks accumulators: contributions, then each of the `exchanges` once, in this order, then `reduce`."""
    done: dict[fx.Node, list[fx.Node]] = {}  # accumulators -> their exchanges so far
    for node in nodes(graph):
        op = op_of(node).name
        for value in operands(node, "accumulators"):
            earlier = done.get(value, [])
            lacking = [exchange for exchange in exchanges if exchange not in [op_of(each).name for each in earlier]]
            if op in exchanges:
                if op not in lacking:
                    again = next(each for each in earlier if op_of(each).name == op)
                    yield Fault(f"{describe(node)} adds up {value.name} over the {_OVER[op]} a second time", "do it once", node,
                                again)
                elif lacking[0] != op:
                    yield Fault(f"{describe(node)} adds up {value.name} over the {_OVER[op]} before it was added up over the "
                                f"{_OVER[lacking[0]]}", f"{lacking[0]} before it", node, value)
                if argument(value, "tile") != argument(node, "tile"):
                    yield Fault(f"{describe(node)} takes accumulators of {argument(value, 'tile')}", "give it its own", node,
                                value)
                done.setdefault(value, []).append(node)
            elif op == "reduce" and lacking:
                yield Fault(f"{describe(node)} reduces gradients of this {_OVER[lacking[0]][:-1]} alone",
                            f"{lacking[0]} before it", node, value)
            elif op != "reduce" and earlier:
                first = op_of(earlier[0]).name
                yield Fault(f"{describe(node)} adds to {value.name} after it was added up over the {_OVER[first]}",
                            f"{first} after the last contribution", node, earlier[0])


def _norms(graph: fx.Graph) -> Iterator[Fault]:
    alone: dict[fx.Node, fx.Node] = {}  # reduced -> itself, while its norms are those of a shard
    on_host: dict[str, fx.Node] = {}  # tile -> the node that took norms of a shard in host memory
    for node in nodes(graph):
        op, tile = op_of(node).name, argument(node, "tile")
        for value in operands(node, "reduced"):
            if op == "share_norms":
                if alone.pop(value, None) is None:
                    yield Fault(f"{describe(node)} would add up norms of whole gradients", "drop it", node)
            elif value in alone:
                yield Fault(f"{describe(node)} reads norms of this rank's shard", "share_norms before it", node, value)
        if op == "reduce":
            alone[node] = node
        elif op == "norms_of_sum" or (op == "accumulate" and not argument(node, "overwrite")):
            on_host[tile] = node
        elif op == "share_host_norms":
            if on_host.pop(tile, None) is None:
                yield Fault(f"{describe(node)} would add up norms of whole gradients", "drop it", node)
        elif op in (*UPDATE_OPS, "fetch_gradients") and tile in on_host:
            yield Fault(f"{describe(node)} reads norms of this rank's shard", "share_host_norms before it", node, on_host[tile])
    for node in (*alone.values(), *on_host.values()):
        yield Fault(f"the norms that {describe(node)} takes are those of a shard, and are never exchanged",
                    f"{'share_norms' if op_of(node).name == 'reduce' else 'share_host_norms'} after it", node)


def _resident(graph: fx.Graph) -> Iterator[Fault]:
    updated: dict[str, fx.Node] = {}
    for node in find(graph, "update_on_device", "gather_resident"):
        tile = argument(node, "tile")
        if op_of(node).name == "update_on_device":
            updated[tile] = node
        elif updated.pop(tile, None) is None:
            yield Fault(f"{describe(node)} does not follow an update of {tile} on the device", "drop it", node)
    for tile, node in updated.items():
        yield Fault(f"each device has only its own shard of the weights of {tile} updated", "gather_resident after it", node)


def _matrices(program: Program, graph: fx.Graph) -> Iterator[Fault]:
    """Checks that whole matrices are updated with the momentum of all ranks."""
    gathered: dict[fx.Node, fx.Node] = {}
    for node in find(graph, "momentum", "gather_momentum", "update_visiting", "update_on_device"):
        op, tile, read = op_of(node).name, argument(node, "tile"), operands(node, "momentum")
        if op == "gather_momentum" and read[0] in gathered:
            yield Fault(f"{describe(node)} gathers {read[0].name} a second time", "gather it once", node, gathered[read[0]])
        for value in read:
            if (other := argument(value, "tile")) != tile:
                yield Fault(f"{describe(node)} takes the momentum of {other}", "give it its own", node, value)
            if op != "gather_momentum" and value not in gathered:
                yield Fault(f"{describe(node)} reads the momentum of this rank's shard", "gather_momentum before it", node,
                            value)
        if op == "gather_momentum":
            gathered[read[0]] = node
        elif op != "momentum" and program.tiles[tile].visit_bytes and not read:
            yield Fault(f"{describe(node)} has a part of each matrix of {tile}, and its update reads whole ones",
                        "let it visit the device, with the momentum of all ranks", node)


def _announced(graph: fx.Graph) -> Iterator[Fault]:
    updates = {argument(node, "tile"): node for node in find(graph, *UPDATE_OPS, "offload_weights", "update_moments")}
    announced = list(find(graph, "announce"))
    if len(announced) != bool(updates):
        yield Fault(f"{len(announced)} announce in a section that updates {len(updates)} tiles",
                    "announce once, after the last update, where any tile is updated", next(iter(announced), None))
        return
    for node in announced:
        if missing := sorted(updates.keys() - set(argument(node, "tiles"))):
            yield Fault(f"{describe(node)} leaves out {missing[0]}", "announce every tile that is updated", node,
                        updates[missing[0]])
        writes = {argument(other, "tile"): other for other in find(graph, "write_state")}
        if unlike := sorted(writes.keys() ^ set(argument(node, "on_disk") or ())):
            yield Fault(f"{describe(node)} names other tiles in on_disk than those that are written: {unlike[0]}, for example",
                        "name every tile that is written, and no other, in on_disk", node, writes.get(unlike[0]))
        last = {*updates.values(), *writes.values()}
        late = next((other for other in graph.nodes if other in last and other > node), None)
        if late is not None:
            yield Fault(f"{describe(node)} comes before {describe(late)}", "announce after the last update", node, late)


def _losses(graph: fx.Graph) -> Iterator[Fault]:
    shared: set[fx.Node] = set()
    for node in nodes(graph):
        if op_of(node).name == "share_loss":
            (value,) = operands(node, "value")
            if value in shared or op_of(value).name != "total_loss":
                yield Fault(f"{describe(node)} takes {value.name}, which is not a loss of this rank", "give it a total_loss, "
                            "once", node, value)
            shared.add(value)
        elif op_of(node).name == "result":
            for value in operands(node, "values"):
                if op_of(value).name == "loss" or (op_of(value).name == "total_loss" and value not in shared):
                    yield Fault(f"{describe(node)} returns the loss of this rank's rows", "share_loss before it", node, value)
