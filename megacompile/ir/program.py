"""`Program`: a schedule as data, one `torch.fx.Graph` for each section, over the ops of `ops.py`.

A training step of a streamed model consists of copies, kernels and optimizer updates on several lanes. Each of them is one
node of a graph that can be printed, verified, simulated and run.

A program has *sections* (forward, evaluate, backward, backward_accumulate, update, load), each a straight line of nodes in
program order. Program order defines the result (`runtime/reference.py`); only `record` and `wait` order work between lanes.
The user's loop decides the order of sections. So each section declares with `enter` the events that it takes from the sections
before it, and with `leave` the events that it hands to those after it.

*Places* are where values live, as strings: a slot ("W0", a device buffer that tiles take turns in), a host slab ("D3"),
a part of a tile in host memory ("weights/layers.0", "gradients/layers.0"), or the value's own memory ("%h1_0").
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import fx

from megacompile.ir import folding, printing
from megacompile.ir.nodes import (
    Builder,
    Kept,
    accesses,
    argument,
    copy_section,
    find,
    lane_of,
    nodes,
    op_of,
    operands,
    place_of,
    places,
    rebuild,
    results_of,
    uses,
)
from megacompile.ir.ops import OPS, Access, Lane, Op
from megacompile.ir.places import (
    SLOT_KINDS,
    TILE_PARTS,
    lanes_against,
    lanes_that,
    place_kind,
    size_classes,
    slot_family,
    stays,
)
from megacompile.ir.plan import BatchSpec, Plan
from megacompile.ir.precision import Float8


# --------------------
# Facts that follow from the tiles of each call: the layers that have a backward, and the tiles at the boundary.
class Reader(Protocol):
    """The part of `CallSpec` that tells which tiles a call reads."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def tiles(self) -> tuple[str, ...]: ...


def first_trained(calls: Sequence[Reader], trains: Callable[[str], bool]) -> int:
    """The number of the first call that reads a tile that `trains`; the number of calls if there is none."""
    return next((i for i, call in enumerate(calls) if any(map(trains, call.tiles))), len(calls))


def differentiated_layers(calls: Sequence[Reader], trains: Callable[[str], bool]) -> list[str]:
    """The names of the layers that have a backward: those from the first call on that reads a trained tile."""
    return [call.name for call in calls[first_trained(calls, trains):] if call.role == "layer"]


def boundary_tiles(calls: Sequence[Reader]) -> set[str]:
    """The tiles that the prologue or the epilogue reads. They are the largest, and have their own slots."""
    return {tile for call in calls if call.role != "layer" for tile in call.tiles}


__all__ = [
    "OPS", "SLOT_KINDS", "STAGES", "TILE_PARTS", "VISITING_BYTES", "Access", "Builder",
    "CallSpec", "Kept", "Lane", "Op", "Program", "Slot", "Tile", "accesses", "argument", "copy_section", "differentiated",
    "find", "gives_outputs", "lane_of", "lanes_against", "lanes_that", "nodes", "op_of", "operands", "place_kind", "place_of",
    "places", "reached", "rebuild", "results_of", "size_classes", "slot_family", "stays", "trainable", "uses"]

#: Bytes of a chunk of a visiting tile. Copies of this size reach the link's rate, and the slot costs a plan little memory.
VISITING_BYTES = 1 << 25


@dataclass(frozen=True)
class Tile:
    """The host memory of one layer, of the prologue, of the epilogue or of a tied weight. Bytes are per transfer over the link.
    `state_bytes`: of the optimizer's state. `visit_bytes`: the device memory for the tile's largest matrix, with its state and
    products, if whole matrices are updated. `disk_bytes`: of each rank's share of its moments, if they are on disk. `rule`: the
    optimizer that updates it, such as "lion", or "adamw+muon" for a tile of two; empty: AdamW. `routed_bytes`: of a tile of
    experts, most bytes of those that a router chooses in a call, if only these are copied; 0: all are."""

    name: str
    parameters: int
    weight_bytes: int
    gradient_bytes: int
    trainable: bool
    state_bytes: int = 0
    visit_bytes: int = 0
    disk_bytes: int = 0
    rule: str = ""
    routed_bytes: int = 0

    def bytes_of(self, kind: str, ranks: int = 1) -> int:
        """Bytes that a value of this kind takes in a slot of one of `ranks` ranks."""
        shard = self.weight_bytes // ranks
        match kind:
            case "state":
                return self.state_bytes // ranks
            case "held":
                return self.weight_bytes + self.gradient_bytes + self.state_bytes
            case "visiting":
                return max(self.visit_bytes, min(VISITING_BYTES, self.state_bytes // ranks + 2 * shard))
            case "momentum":  # in bf16, and what computes it of one matrix
                return self.weight_bytes + self.visit_bytes if self.visit_bytes else 0
            case "moments":
                return self.disk_bytes
            case "weights" | "staging":
                return self.weight_bytes
            case "shard" | "packed_shard":
                return shard
        return shard + self.gradient_bytes - self.weight_bytes  # each rank has all norms

    def moved_bytes(self, op: Op, ranks: int = 1) -> int:
        """Bytes that a copy moves."""
        if op.name == "offload_norms":
            return 0  # a few
        if op.name in ("fetch_held", "return_state"):
            return self.state_bytes
        if op.name == "prefetch_routed":
            return self.routed_bytes
        if op.name in ("offload_weights", "return_weights"):
            return self.weight_bytes // ranks
        return self.bytes_of(op.result or "", ranks)


@dataclass(frozen=True)
class CallSpec:
    """One use of a template: the prologue, each layer, the epilogue, in order. `weightless` lists the variants that read no
    weights (an embedding's backward needs only indices). `output_bytes`: the size of its output for one sequence.
    `bytes_of_each`: the same for one sequence of each micro-batch, if their lengths differ."""

    name: str
    role: str  # "prologue", "layer", "epilogue"
    template: str
    tiles: tuple[str, ...]
    weightless: tuple[str, ...] = ()
    output_bytes: int = 0
    bytes_of_each: tuple[int, ...] = ()


@dataclass(frozen=True)
class Slot:
    """A buffer that values use in turn. The letters of its name give its family (`SLOT_KINDS`)."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Program:
    """A schedule at one stage of compilation. A pass never changes a program; it returns another one.

    `ranks`: the number of processes, each with its device, that run this program together and share a copy of its tiles.
    `hosts`: the number of copies. `spread`: the number of hosts that each copy is divided among. `precision`: the recipe by
    which its templates multiply in float8; None: no float8."""

    stage: str
    micro_batches: tuple[int, ...]
    tiles: Mapping[str, Tile]
    calls: tuple[CallSpec, ...]
    slots: Mapping[str, Slot] = field(default_factory=dict)
    sections: Mapping[str, fx.Graph] = field(default_factory=dict)
    ranks: int = 1
    hosts: int = 1
    spread: int = 1
    precision: Float8 | None = None

    @property
    def processes(self) -> int:
        """The number of processes that run this program together."""
        return self.ranks * self.hosts

    @property
    def together(self) -> tuple[str, ...]:
        """The sections that all ranks run together. In other sections a rank works alone."""
        return sections_of_all_ranks(self.spread)

    def section(self, name: str) -> fx.Graph:
        return self.sections[name]

    def evolve(self, **changes: Any) -> Program:
        return replace(self, **changes)

    def call(self, name: str) -> CallSpec:
        return next(c for c in self.calls if c.name == name)

    def number(self, name: str) -> int:
        """The position of a call, or of the first call that reads a tile. So w3, h3 and g3 belong to the same layer."""
        return next(i for i, call in enumerate(self.calls) if name == call.name or name in call.tiles)

    def value_bytes(self, node: fx.Node) -> int:
        """Bytes that a node's value takes in a slot: a tile, or a call's output for one micro-batch."""
        if argument(node, "tile") is not None:
            return self.tiles[argument(node, "tile")].bytes_of(op_of(node).result or "", self.ranks)
        mb: int = argument(node, "mb")
        call = self.call(argument(node, "call"))
        return (call.bytes_of_each[mb] if call.bytes_of_each else call.output_bytes) * self.micro_batches[mb]

    def moved_bytes(self, node: fx.Node) -> int:
        """Bytes that a node copies from one memory to another."""
        if op_of(node).name in ("stash", "fetch"):
            return self.value_bytes(node)
        tile = argument(node, "tile")
        if tile is None:
            return 0
        also = op_of(node).name == "fetch_held" and not operands(operands(node, "held")[0], "current")
        return self.tiles[tile].moved_bytes(op_of(node), self.ranks) + also * self.tiles[tile].weight_bytes

    def head(self, made_for: tuple[BatchSpec, Plan] | None = None) -> str:
        """The text above the sections: the declarations. `made_for` is declared in it (`text.parse_with_plan`)."""
        once = zip(printing.ONCE, (self.precision, *(made_for or ())), strict=False)
        declared = [*((kind, one) for kind, one in once if one is not None), *(("tile", tile) for tile in self.tiles.values()),
                    *(("call", call) for call in self.calls), *(("slot", slot) for slot in self.slots.values())]
        processes = {"ranks": self.ranks, "hosts": self.hosts, "spread": self.spread}
        return printing.print_head(self.stage, self.micro_batches, processes, declared)

    def text(self, section: str | None = None, *, fold: bool = False, made_for: tuple[BatchSpec, Plan] | None = None) -> str:
        """Python that rebuilds this program (`text.parse`). The text is deterministic. `section`: only this section's function.
        `fold` prints repeated layers once, for reading only: that text does not parse. `made_for`: as in `head`."""
        head = self.head(made_for)
        print_section = folding.fold_section if fold else printing.print_section
        shown = self.sections if section is None else {section: self.section(section)}
        sections = [print_section(name, list(nodes(graph))) for name, graph in shown.items()]
        return "\n".join([*([folding.fold_head(head) if fold else head] if section is None else []), *sections])

    def table(self, section: str | None = None) -> str:
        """A row for each node, in program order, in its lane's column, then the places that it reads and writes."""
        shown = self.sections if section is None else {section: self.section(section)}
        return "\n\n".join(printing.table_section(name, list(nodes(graph))) for name, graph in shown.items())

    def __str__(self) -> str:
        return self.text()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self.text() == other.text()

    def __hash__(self) -> int:
        return hash(self.text())


def gives_outputs(program: Program) -> bool:
    """True if training returns the epilogue's outputs, not a loss. The caller then sends their gradient."""
    return "forward" in program.sections and any(find(program.section("forward"), "outputs"))


def differentiated(program: Program) -> list[str]:
    """The layers that have a backward: those from the first call on that trains a parameter."""
    return differentiated_layers(program.calls, lambda tile: program.tiles[tile].trainable)


def trainable(program: Program, tiles: Iterable[str]) -> tuple[str, ...]:
    """The trained tiles among `tiles`, in the same order."""
    return tuple(tile for tile in tiles if program.tiles[tile].trainable)


#: The stages of compilation, in order; a stage is named after the pass that made it.
STAGES = ("model", "micro_batch", "partition", "differentiate", "prefetch", "offload", "optimizer", "shard",
          "place", "synchronize")
def sections_of_all_ranks(spread: int) -> tuple[str, ...]:
    """The sections that all ranks run together, if each copy of the tiles is divided among `spread` hosts. Where one host has
    all of them, a rank evaluates alone."""
    return ("forward", "backward", "backward_accumulate", "train_step", "update") + (("evaluate", "load") if spread > 1 else ())


def reached(program: Program, stage: str) -> bool:
    """True if a program has passed through the stage of that name."""
    return STAGES.index(program.stage) >= STAGES.index(stage)


# -------------------- Calls and tiles -> the first program: the model's computation on the whole batch, before any pass
def model_program(calls: Sequence[CallSpec], tiles: Mapping[str, Tile], batch: int, labels: bool,
                  whole_step: bool = False, differentiable: bool = False, hidden_states: bool = False,
                  precision: Float8 | None = None) -> Program:
    """The program of stage "model". With labels it has the sections `forward` (training) and `evaluate`. Without labels it has
    one section that returns the epilogue's outputs: `forward` if they are `differentiable`, else `evaluate`. With
    `hidden_states` that section also returns the outputs of every call before the last layer. A whole step is one section,
    `train_step`. `precision`: of the templates."""
    if whole_step:
        sections = {"train_step": _chain(calls, "loss")}
    elif labels:
        sections = {"forward": _chain(calls, "loss"), "evaluate": _chain(calls, "evaluate")}
    else:
        sections = {"forward" if differentiable else "evaluate": _chain(calls, "outputs", hidden_states)}
    return Program("model", (batch,), dict(tiles), tuple(calls), {}, sections, precision=precision)


def _chain(calls: Sequence[CallSpec], last: str, hidden_states: bool = False) -> fx.Graph:
    """Builds the calls of a micro-batch. Each reads the outputs of the call before it and those of the prologue."""
    graph = fx.Graph()
    build = Builder(graph, "model")
    shared: fx.Node | None = None
    carried: fx.Node | None = None
    made: list[fx.Node] = []
    for position, call in enumerate(calls):
        inputs = () if carried is None else (carried, shared)
        op = last if call.role == "epilogue" else "forward"
        name = {"prologue": "s", "epilogue": "l"}.get(call.role, f"h{position}")
        carried = build.add(op, name, template=call.template, call=call.name, mb=0, inputs=inputs)
        shared = shared if shared is not None else carried
        made.append(carried)
    if hidden_states:  # the last layer's is the epilogue's: models return it after their last norm
        build.add("result", key="forward", values=tuple(made[:-2]))
    build.add("result", key=last, values=(carried,))
    return graph
