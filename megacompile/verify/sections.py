"""Rules about whole sections: where each op may stand, what the caller gets, and that gradients and weight versions are right.

The built-in passes always keep them; a hand-edited program or a user's pass may not.
"""
from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from megacompile.ir.listing import describe
from megacompile.ir.ops import UPDATE_OPS
from megacompile.ir.program import Kept, Program, argument, find, nodes, op_of, operands
from megacompile.verify.fault import Fault
from megacompile.verify.sums import summed_tiles

_BACKWARDS = ("backward", "backward_accumulate", "train_step")
_UPDATES = ("update", "backward", "train_step")
#: Op -> the sections in which it may stand. Other ops may stand in any section.
_SECTIONS: dict[str, tuple[str, ...]] = {
    "loss": ("forward", "train_step"), "evaluate": ("evaluate",), "outputs": ("forward", "evaluate"),
    "lease": ("forward",), **dict.fromkeys(("leased", "scale", "output_gradient"), ("backward", "backward_accumulate")),
    **dict.fromkeys(("backward", "recompute_backward", "reduce", "offload", "accumulate"), _BACKWARDS),
    "stash": ("forward", "train_step"), "fetch": _BACKWARDS, "stashed": ("backward", "backward_accumulate"),
    **dict.fromkeys(("offload_norms", "add_to_sum", "norms_of_sum"), ("train_step",)),
    "clip": ("update",), "update_from_sum": ("update", "train_step"),
    **dict.fromkeys(("update", "update_on_device", "read_state", "write_state"), _UPDATES),
    **dict.fromkeys(("update_weights", "update_moments", "update_visiting"), ("update",)),
    "offload_weights": (*_UPDATES, "rescue"), "fetch_gradients": ("backward_accumulate", "refresh"),
    "fetch_state": ("load",), "store_state": ("store",),
    **dict.fromkeys(("reduce_scatter", "all_reduce", "share_norms"), _BACKWARDS),
    "share_host_norms": ("backward_accumulate", "train_step"),
    **dict.fromkeys(("pack_shard", "prefetch_shard", "gather"), ("forward", "update", *_BACKWARDS)),
    **dict.fromkeys(("gather_resident", "announce"), _UPDATES),
    **dict.fromkeys(("total_loss", "share_loss"), ("forward", "train_step"))}
_RESULTS = ("loss", "evaluate", "outputs")
#: Ops that copy weights from the host, the whole tile or a shard.
_FETCHES = ("pack", "prefetch", "pack_shard", "prefetch_shard")
_GRADIENTS = ("gradient", "accumulators")


def belongs(program: Program) -> Iterator[Fault]:
    """Each op is in a section where it has a meaning: gradients are sent in a backward, tiles are updated in an update."""
    for name, graph in program.sections.items():
        for node in nodes(graph):
            allowed = _SECTIONS.get(op_of(node).name, (name,))
            if name not in allowed:
                yield Fault(f"{describe(node)} is in {name}", f"{op_of(node).name} belongs in {' or '.join(allowed)}", node)


def returned(program: Program) -> Iterator[Fault]:
    """The caller gets the loss (or the outputs) of every micro-batch, once each and in order, under the name of the op. With
    outputs it may get hidden states: those of every call but the last two, of every micro-batch, in order."""
    for name, graph in program.sections.items():
        made = sorted(find(graph, *_RESULTS), key=lambda node: int(argument(node, "mb")))
        given: list[fx.Node] = []
        hidden: list[fx.Node] = []
        for result in find(graph, "result"):
            for value in _parts(result):
                (hidden if op_of(value).name == "forward" else given).append(value)
                if argument(result, "key") != op_of(value).name:
                    yield Fault(f"{describe(result)} hands over {value.name}, which is of {op_of(value).name}",
                                f'hand it over as "{op_of(value).name}"', result, value)
        lost = next((node for node in made if node not in given), None)
        if lost is not None:
            yield Fault(f"{describe(lost)} is never handed to the caller in {name}", "name it in a result", lost)
        if given != made:
            yield Fault(f"{name} hands over {', '.join(n.name for n in given)}, not {', '.join(n.name for n in made)}",
                        "hand over each micro-batch's value once, in order", next(find(graph, "result"), None))
        forwards = {(argument(n, "call"), argument(n, "mb")): n for n in find(graph, "forward")}
        wanted = [forwards.get((call.name, mb)) for call in program.calls[:-2] for mb in range(len(program.micro_batches))]
        if hidden and (hidden != wanted or not any(find(graph, "outputs"))):
            yield Fault(f"{name} hands over hidden states, and not those of every call but the last two",
                        "hand over each call's, of each micro-batch, in order, or none", next(find(graph, "result"), None))


def _parts(result: fx.Node) -> Iterator[fx.Node]:
    """The values that a result hands over; those of a total loss are its parts."""
    for value in operands(result, "values"):
        yield from operands(value, "values") if op_of(value).name == "total_loss" else (value,)


def added_up(program: Program) -> Iterator[Fault]:
    """Each section adds up a tile's gradients in one value, or in several that the host adds up (rule `summed`). The forward
    keeps what it adds up for the backward. The backward scales the gradients that the forward kept by the gradient of the
    caller's loss, and nothing else."""
    kept = {}
    if "forward" in program.sections:
        kept = {Kept.of(value): value for lease in find(program.section("forward"), "lease")
                for value in operands(lease, "value")}
    for name, graph in program.sections.items():
        sums: dict[str, fx.Node] = {}
        on_host = summed_tiles(program, name)
        for node in nodes(graph):
            for value in operands(node, "accumulators"):
                made = kept.get(Kept.of(value), value) if op_of(value).name == "leased" else value
                other = sums.setdefault(str(argument(made, "tile")), value)
                if other is not value and argument(made, "tile") not in on_host:
                    yield Fault(f"{describe(node)} uses {value.name}, but {other.name} holds gradients of the same tile: a "
                                "part would be lost", f"use {other.name}", node, other)
                if name == "forward" and value not in kept.values():
                    yield Fault(f"{describe(node)} adds to {value.name}, which is not kept for the backward", "lease it",
                                node, value)
        for node in find(graph, "scale"):
            (value,) = operands(node, "value")
            if op_of(value).name != "leased" or op_of(kept.get(Kept.of(value), value)).result not in _GRADIENTS:
                yield Fault(f"{describe(node)} scales a value, not a gradient that the forward kept", "drop it", node, value)


def one_version(program: Program) -> Iterator[Fault]:
    """A section that updates tiles computes with their old weights: nothing runs on weights that were fetched after a tile's
    update, and each update comes after the tile's gradients."""
    for name, graph in program.sections.items():
        home: dict[str, fx.Node] = {}
        updated: dict[str, fx.Node] = {}
        stale: dict[fx.Node, fx.Node] = {}  # weights -> the update before them
        for node in nodes(graph):
            tile, op = argument(node, "tile"), op_of(node).name
            if op in UPDATE_OPS:
                updated[tile] = node
                if op != "update_on_device" and name != "update" and tile not in home:
                    yield Fault(f"{describe(node)} comes before the tile's gradients are in host memory in {name}",
                                "update it after its offload (or accumulate)", node)
            elif op in ("accumulate", "offload", "add_to_sum"):
                home[tile] = node
                if tile in updated:
                    yield Fault(f"{describe(node)} brings gradients of a tile that {describe(updated[tile])} has updated",
                                "update it after its gradients are offloaded", node, updated[tile])
            elif op in _FETCHES and tile in updated:
                stale[node] = updated[tile]
            elif op == "gather" and (shard := operands(node, "shard")[0]) in stale:
                stale[node] = stale[shard]
            for value in operands(node, "weights"):
                newer = stale.get(value) or (updated.get(str(argument(value, "tile"))) if op_of(value).name == "resident"
                                             else None)
                if newer is not None:
                    yield Fault(f"{describe(node)} would run on weights that {describe(newer)} has updated",
                                "fetch and use them before the update", node, newer)
