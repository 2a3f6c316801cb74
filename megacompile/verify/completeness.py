"""Rules about a whole training step: each call is visited once, each gradient is copied to the host once."""
from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from megacompile.ir.ops import UPDATE_OPS
from megacompile.ir.printing import describe
from megacompile.ir.program import Kept, Program, argument, find, gives_outputs, nodes, op_of, operands, reached, trainable
from megacompile.verify.fault import Fault
from megacompile.verify.ordering import Stashed, stashed_by
from megacompile.verify.updates import consumed_there, once, summed_tiles, updated_there, updates_on_arrival

_FORWARD = ("forward", "forward_saving", "loss", "evaluate", "outputs")
_BACKWARD = ("backward", "recompute_backward")
#: Ops that make what a parameter takes.
_MAKERS = {"inputs": ("forward", "forward_saving", "stash", "stashed", "fetch"), "saved": ("forward_saving",),
           "gradient": ("loss", *_BACKWARD), "output gradient": ("output_gradient",)}
_BACKWARD_SECTIONS = {"backward": True, "backward_accumulate": False, "train_step": True}  # whether it overwrites gradients


def supplied(program: Program) -> Iterator[Fault]:
    """Each compute node has the weights of its call's tiles, in their order. Experts that are copied by choice are those that
    the call before has chosen. A checkpoint in host memory is fetched before it is read."""
    calls = {call.name: call for call in program.calls}
    for graph in program.sections.values():
        for node in find(graph, *_FORWARD, *_BACKWARD):
            call = calls[argument(node, "call")]
            needed = [] if op_of(node).name in call.weightless else list(call.tiles)
            given = [argument(value, "tile") for value in operands(node, "weights")]
            if given != needed:
                yield Fault(f"{describe(node)} has weights of {given or 'nothing'}, but reads {needed or 'nothing'}",
                            "prefetch what the call reads, in the order of its tiles", node)
            for value in operands(node, "weights"):
                for router in operands(value, "router"):
                    if router not in operands(node, "inputs")[:1]:
                        yield Fault(f"{describe(node)} reads experts that {describe(router)} has chosen",
                                    "copy those that the call before it has chosen", node, value)
            for value in operands(node, "inputs"):
                if op_of(value).result == "stashed":
                    yield Fault(f"{describe(node)} reads {value.name}, which is in host memory", "fetch it", node, value)


# Forward and backward

class _Origins:
    """Finds the call and micro-batch that a value came from, also through leases."""

    def __init__(self, program: Program) -> None:
        self.kept: dict[Kept, fx.Node] = {}
        if "forward" in program.sections:
            for lease in find(program.section("forward"), "lease"):
                (value,) = operands(lease, "value")
                self.kept[Kept.of(value)] = value

    def made(self, value: fx.Node) -> fx.Node | None:
        """The node that computed a value; None for a leased value that the forward does not keep."""
        return self.kept.get(Kept.of(value)) if op_of(value).name == "leased" else value

    def of(self, value: fx.Node) -> tuple[str | None, int | None]:
        made = self.made(value)
        return (None, None) if made is None else (argument(made, "call"), argument(made, "mb"))

    def tile(self, accumulators: fx.Node) -> str | None:
        made = self.made(accumulators)
        return None if made is None or op_of(made).result != "accumulators" else argument(made, "tile")


def trained(program: Program) -> Iterator[Fault]:
    """The forward visits every call once for each micro-batch, in order; the backward every call that can train, last call
    first. Each node takes values of its own micro-batch, from the neighboring calls."""
    origins = _Origins(program)
    for name, graph in program.sections.items():
        if name == "train_step":
            yield from _forward(program, name, graph)
            yield from _backward_visits(program, name, graph)
        elif name in _BACKWARD_SECTIONS:
            yield from _backward(program, name, graph)
            yield from _leases(program, name, graph, origins)
        elif any(find(graph, *_FORWARD)):
            yield from _forward(program, name, graph)
        yield from _values(program, graph, origins)
    if "forward" in program.sections and "backward" not in program.sections:
        yield Fault("the program has a forward and no backward", "add the section")


def _forward(program: Program, name: str, graph: fx.Graph) -> Iterator[Fault]:
    """Checks the forwards. In a whole step, only those before a micro-batch's loss count: later ones recompute."""
    expected = [call.name for call in program.calls]
    visits, lost = [], set()
    for node in find(graph, *_FORWARD):
        if argument(node, "mb") not in lost:
            visits.append(node)
        if op_of(node).name == "loss":
            lost.add(argument(node, "mb"))
    yield from _visits(program, name, visits, expected, expected)


def _backward_visits(program: Program, name: str, graph: fx.Graph) -> Iterator[Fault]:
    stack = [call for call in reversed(program.calls) if call.role != "epilogue" or gives_outputs(program)]
    required = [call.name for call in stack if trainable(program, call.tiles)]
    yield from _visits(program, name, list(find(graph, *_BACKWARD)), [call.name for call in stack], required)


def _backward(program: Program, name: str, graph: fx.Graph) -> Iterator[Fault]:
    yield from _backward_visits(program, name, graph)
    scaled: dict[fx.Node, fx.Node] = {}
    for node in nodes(graph):
        for value in operands(node, "value") if op_of(node).name == "scale" else ():
            if value in scaled:
                yield Fault(f"{value.name} is scaled twice in {name}", "scale it once", node, scaled[value])
            scaled[value] = node
        for value in (*operands(node, "gradient"), *operands(node, "accumulators")):
            if op_of(value).name == "leased" and value not in scaled:
                yield Fault(f"{describe(node)} uses {value.name} before it is scaled by the gradient that the caller's "
                            "loss sent", "scale it above", node)


def _visits(program: Program, name: str, found: list[fx.Node], order: list[str],
            required: list[str]) -> Iterator[Fault]:
    """Checks that calls come in this order for each micro-batch, none twice, and that no required one is missing."""
    place = {call: i for i, call in enumerate(order)}
    latest: dict[int, fx.Node] = {}
    seen: dict[tuple[str, int], fx.Node] = {}
    for node in found:
        call, mb = argument(node, "call"), argument(node, "mb")
        if (call, mb) in seen:
            yield Fault(f"{describe(node)} is the second visit of {call} for micro-batch {mb} in {name}",
                        "visit it once", node, seen[call, mb])
        elif call not in place:
            yield Fault(f"{describe(node)} does not belong in {name}", "visit it where the loss is computed", node)
        elif mb in latest and place[call] < place[argument(latest[mb], "call")]:
            yield Fault(f"{describe(node)} comes after {describe(latest[mb])} in {name}", "visit calls in order",
                        node, latest[mb])
        seen[call, mb] = latest[mb] = node
    for mb in range(len(program.micro_batches)):
        for call in required:
            if (call, mb) not in seen:
                yield Fault(f"{name} never visits {call} for micro-batch {mb}", "visit each call for each micro-batch")


def _values(program: Program, graph: fx.Graph, origins: _Origins) -> Iterator[Fault]:
    """Checks that inputs, residuals, gradients and accumulators are those of the right call and micro-batch."""
    order = [call.name for call in program.calls]
    position = {call: i for i, call in enumerate(order)}
    for node in find(graph, "stash", "fetch"):
        own = argument(node, "call"), argument(node, "mb")
        for value in node.all_input_nodes:
            if origins.of(value) != own:
                yield Fault(f"{describe(node)} takes {value.name}, which is another checkpoint", "give it its own", node, value)
    for node in find(graph, *_FORWARD, *_BACKWARD):
        call, mb = argument(node, "call"), argument(node, "mb")
        at = position[call]
        wanted = [("inputs", value, order[at - 1] if i == 0 else order[0])
                  for i, value in enumerate(operands(node, "inputs"))]
        wanted += [("saved", value, call) for value in operands(node, "saved")]
        wanted += [("gradient", value, order[at + 1]) if at + 1 < len(order) else ("output gradient", value, call)
                   for value in operands(node, "gradient")]
        for parameter, value, source in wanted:
            made = origins.made(value)  # `well_formed` cannot know what a leased value is
            if made is not None and op_of(made).name not in _MAKERS[parameter]:
                yield Fault(f"{describe(node)} takes {value.name} of {op_of(made).name} as {parameter}",
                            f"give it a value of {' or '.join(_MAKERS[parameter])}", node, value)
            if origins.of(value) != (source, mb):
                got = " mb ".join(map(str, origins.of(value)))
                yield Fault(f"{describe(node)} takes {value.name} of {got} as {parameter}",
                            f"give it the value of {source} mb {mb}", node, value)
        if op_of(node).name in (*_BACKWARD, "loss"):
            tiles = [origins.tile(value) for value in operands(node, "accumulators")]
            expected = list(trainable(program, program.calls[at].tiles))
            if tiles != expected:
                yield Fault(f"{describe(node)} adds to the gradients of {tiles}, but trains {expected}",
                            "give it the accumulators of its call's trainable tiles", node)


def _leases(program: Program, name: str, graph: fx.Graph, origins: _Origins) -> Iterator[Fault]:
    """Checks that the backward takes each value that the forward kept, once, and no other."""
    taken: dict[Kept, fx.Node] = {}
    for node in find(graph, "leased"):
        what = Kept.of(node)
        if what not in origins.kept or what in taken:
            why = "is taken twice" if what in taken else "is kept by no forward"
            yield Fault(f"lease {what} {why} in {name}", "take each lease once", node, taken.get(what))
        taken[what] = node
    given: dict[Kept, fx.Node] = {}
    for lease in find(program.section("forward"), "lease"):
        what = Kept.of(operands(lease, "value")[0])
        if what in given:
            yield Fault(f"{what} is leased twice", "lease each value once", lease, given[what])
        given[what] = lease
        if what not in taken:
            yield Fault(f"lease {what} is never taken in {name}: its memory would never be freed",
                        "take it in the backward", lease)
    yield from _stashes(name, graph, program.section("forward"))


def _stashes(name: str, graph: fx.Graph, forward: fx.Graph) -> Iterator[Fault]:
    """Checks that the backward takes each checkpoint that the forward stashed, once, from its slot, and no other."""
    sent: dict[Stashed, fx.Node] = {}
    taken: dict[Stashed, fx.Node] = {}
    for section, op, seen in ((forward, "stash", sent), (graph, "stashed", taken)):
        for node in find(section, op):
            what = stashed_by(node)
            if what in seen:
                yield Fault(f"{describe(node)} is the second {op} of its checkpoint", f"{op} each once", node, seen[what])
            seen[what] = node
    for what, node in taken.items():
        source = sent.pop(what, None)
        if source is None:
            yield Fault(f"{describe(node)} takes a checkpoint in {name} that no forward stashes", "stash it", node)
        elif argument(source, "into") != argument(node, "into"):
            yield Fault(f"{describe(node)} takes its checkpoint from {argument(node, 'into')}, but the forward puts it into "
                        f"{argument(source, 'into')}", "take it from there", node, hazard=True)
    for node in sent.values():
        yield Fault(f"{describe(node)} is never taken in {name}: its memory would never be freed",
                    "take it in the backward", node)


# Gradients to the host

def sent_home(program: Program) -> Iterator[Fault]:
    """Each trainable tile's accumulators are reduced once, after the last contribution, and offloaded once: into the tile's
    gradients, or through a slab that is accumulated once or, on arrival, read by one update. The gradients of a tile that is
    updated on the device stay there; a whole step copies only their norms."""
    origins = _Origins(program)
    tiles, there, consumed = trainable(program, program.tiles), updated_there(program), consumed_there(program)
    for name, overwrite in _BACKWARD_SECTIONS.items():
        if name not in program.sections:
            # If the backward itself updates, it consumes gradients, so none are left to add to.
            if "forward" in program.sections and name != "train_step" and not updates_on_arrival(program):
                yield Fault(f"the program has a forward and no {name}", "add the section")
            continue
        graph, summed = program.section(name), summed_tiles(program, name)
        yield from once(name, graph, ("reduce",), tiles, summed)
        yield from once(name, graph, ("offload",), [t for t in tiles if t not in consumed], summed)
        if reached(program, "optimizer") and not updates_on_arrival(program):
            if name == "train_step":
                yield from once(name, graph, ("offload_norms",), there)
            yield from _gradients_stay(program, name, graph, there, overwrite)
        reduced: dict[fx.Node, fx.Node] = {}
        for node in nodes(graph):
            for value in operands(node, "accumulators"):
                if value in reduced:
                    yield Fault(f"{describe(node)} uses {value.name} after it was reduced: the gradient would be lost",
                                "reduce after the last contribution", node, reduced[value])
                if op_of(node).name == "reduce":
                    reduced[value] = node
                    if origins.tile(value) != argument(node, "tile"):
                        yield Fault(f"{describe(node)} reduces the accumulators of {origins.tile(value)}",
                                    "give it those of its own tile", node, value)
        for node in find(graph, "offload"):
            if argument(node, "tile") not in summed:
                yield from _arrival(program, name, node, overwrite)
        if updates_on_arrival(program):
            yield from _from_slabs(graph)


def _from_slabs(graph: fx.Graph) -> Iterator[Fault]:
    for node in find(graph, "add_to_sum", *UPDATE_OPS):
        if op_of(node).name not in ("update_from_sum", "update_on_device") and not operands(node, "slab"):
            yield Fault(f"{describe(node)} reads gradients in host memory, which holds none, since tiles are updated on "
                        "arrival", "offload them to a slab, and let it read that", node)


def _arrival(program: Program, name: str, offload: fx.Node, overwrite: bool) -> Iterator[Fault]:
    added = [user for user in offload.users if op_of(user).name == "accumulate"]
    updated = [user for user in offload.users if op_of(user).name in ("update",)]
    used = len(added) + len(updated)
    slab = bool(used) if not reached(program, "place") else argument(offload, "into") is not None
    if used != slab:
        yield Fault(f"{describe(offload)} goes {'to a slab' if slab else 'straight to the tile'} and is accumulated, or used "
                    f"by an update, {used} times", "accumulate each slab once, or update with it, and nothing else", offload)
    if not overwrite and not slab:
        yield Fault(f"{describe(offload)} overwrites gradients that {name} must add to", "offload to a slab", offload)
    for node in added:
        if argument(node, "overwrite") != overwrite:
            yield Fault(f"{describe(node)} {'adds to' if overwrite else 'overwrites'} the tile's gradients in {name}",
                        f"say overwrite={overwrite}", node)


def _gradients_stay(program: Program, name: str, graph: fx.Graph, there: list[str], overwrite: bool) -> Iterator[Fault]:
    """Checks that gradients stay in the slot that the update on the device reads, and that sums made on the host are fetched
    into it."""
    if not overwrite:
        yield from once(name, graph, ("fetch_gradients",), there)
        for node in find(graph, "fetch_gradients"):
            added = [n for n in nodes(graph) if op_of(n).name == "accumulate" and argument(n, "tile") == argument(node, "tile")]
            if not all(n < node for n in added):
                yield Fault(f"{describe(node)} comes before the host has added them up", "fetch them after accumulate", node)
    slots = {argument(n, "tile"): argument(n, "into") for n in find(program.section("update"), "resident_gradients")
             } if "update" in program.sections else {}
    for node in find(graph, "reduce", "fetch_gradients"):
        tile = argument(node, "tile")
        if reached(program, "place") and tile in there and argument(node, "into") != slots.get(tile):
            yield Fault(f"{describe(node)} leaves gradients in {argument(node, 'into')}, but the update of {tile} reads "
                        f"{slots.get(tile)}", "leave them where the update reads them", node)
