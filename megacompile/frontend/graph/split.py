"""The model graph, cut at its layers: a prologue, one section for each layer call, an epilogue; and when two sections are
equal."""
from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx, nn

from megacompile.compat.core import LazyGraphModule
from megacompile.errors import CaptureError
from megacompile.frontend.templates.template import Source
from megacompile.frontend.tracing.layer_calls import LayerCall, check_chain, layer_calls, source_line
from megacompile.frontend.tracing.layers import LayerStack
from megacompile.frontend.tracing.model_graph import INVOKE, ModelGraph, called_name
from megacompile.ir.precision import Float8

# --------------------
# Moves totals over tokens into the layers, where a model computes them after its last layer from values of all layers.
#
# An auxiliary loss of routers adds up, layer by layer, what each router gave to each expert. The model does this after its last
# layer, so every call would have to pass on the router logits of all earlier layers. If a total needs no values of calls after
# a certain one, that call computes it and passes on the total, which is a few numbers.
#: Ops that change how the nodes after them are computed: nothing may be moved out from there.
MODES = ("_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode")
_FROM_ANYWHERE = ("batch", "size")


def made_in_layers(epilogue: Sequence[fx.Node], made_by: Mapping[fx.Node, int], sources: Mapping[fx.Node, Source],
                   results: Collection[fx.Node], layers: int) -> dict[fx.Node, int]:
    """The nodes of the epilogue, in program order, that earlier calls should compute, and the call that computes each (0 is the
    prologue). `made_by`: the call that makes each value in the original model; the epilogue is call `layers` + 1. The last
    layer computes the same totals as the one before it, so that one template serves both. The rest stays."""
    if any(getattr(node.target, "__name__", "") in MODES for node in epilogue):
        return {}
    possible = _possible(epilogue, made_by, sources, results, layers)
    early = _needed_by_totals({n: s for n, s in possible.items() if s < layers}, range(1, layers))
    pattern = [node for node, stage in early.items() if stage == layers - 1]
    last = [n for n, stage in _needed_by_totals(possible, (layers,)).items() if stage == layers]
    same = [b for a, b in zip(pattern, last, strict=False) if (a.op, a.target) == (b.op, b.target)]
    if pattern and same == last[:len(pattern)]:
        early |= _with_inputs(same, possible)
    for node in early:  # a constant is made where it is read: no call may change what another made
        readers = {early[user] for user in node.users if user in early}
        if not node.all_input_nodes and len(readers) == 1:
            early[node] = readers.pop()
    return {node: early[node] for node in epilogue if node in early}


def _possible(epilogue: Sequence[fx.Node], made_by: Mapping[fx.Node, int], sources: Mapping[fx.Node, Source],
              results: Collection[fx.Node], layers: int) -> dict[fx.Node, int]:
    """The nodes that read no weight and no value that must stay, and the earliest call after which all their inputs exist."""
    stages: dict[fx.Node, int] = {}

    def stage(node: fx.Node) -> int | None:
        if node in sources:
            return 0 if sources[node].kind in _FROM_ANYWHERE else None
        made = made_by.get(node)
        if made is None:  # what goes along with its readers: numbers, and views of weights
            return None if isinstance(node.meta.get("example_value"), Tensor) else 0
        return stages.get(node) if made > layers else made

    for node in epilogue:
        read = [stage(each) for each in node.all_input_nodes]
        if node not in results and None not in read and not _is_changed(node) and not _changes_another(node):
            stages[node] = max((each for each in read if each is not None), default=0)
    return stages


def writes(node: fx.Node) -> bool:
    """True if a node changes its first input in place."""
    name = called_name(node)
    in_place = name.startswith("i") and hasattr(operator, name[1:]) and getattr(operator, name, None) is node.target
    return in_place or name == "setitem" or (name.endswith("_") and not name.endswith("__"))


def _is_changed(node: fx.Node) -> bool:
    """True if a value is changed in place and has other readers. All of them would have to move too."""
    return len(node.users) > 1 and any(writes(user) and user.args[0] is node for user in node.users)


def _changes_another(node: fx.Node) -> bool:
    """True if a node changes in place a value that may come from another call: any value that is not a constant."""
    return writes(node) and bool(node.all_input_nodes[0].all_input_nodes)


def _needed_by_totals(possible: Mapping[fx.Node, int], stages: Collection[int]) -> dict[fx.Node, int]:
    """The totals of these stages with all values that they are computed from."""
    return _with_inputs([n for n, stage in possible.items() if stage in stages and _is_total(n)], possible)


def _with_inputs(nodes: Collection[fx.Node], possible: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    needed, pending = set(nodes), list(nodes)
    while pending:
        found = [n for n in pending.pop().all_input_nodes if n in possible and n not in needed]
        needed.update(found)
        pending += found
    return {node: stage for node, stage in possible.items() if node in needed}


def _is_total(node: fx.Node) -> bool:
    """True if a value's size is the same for all batches."""
    value = node.meta.get("example_value")
    return isinstance(value, Tensor) and not any(isinstance(size, torch.SymInt) for size in value.shape)


NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclasses.dataclass
class Section:
    """A piece of the model graph (Dynamo level). `sources[i]` feeds placeholder i. `carried[i]`: the next call reads result i.
    `has_gradient[i]`: a gradient comes back for it. `layer`: the layer that it is a part of, if any. `share`: its average share
    of what that layer's experts compute. `visit`: 1 on the layer's first run, 2 on its second. `own_names`: the layer's own
    names of its parameters and buffers, by their names in the model."""

    name: str
    graph: fx.GraphModule
    sources: list[Source]
    has_gradient: list[bool]
    carried: list[bool]
    layer: str = ""
    share: Fraction = Fraction(1)
    visit: int = 1
    own_names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def call_name(self) -> str:
        """The name of its call: the layer's name, or on a later run "layers.3@2"."""
        return self.name if self.visit == 1 else f"{self.name}@{self.visit}"


def needs_gradient(node: fx.Node) -> bool:
    return bool(getattr(node.meta["example_value"], "requires_grad", False))


def split_at_layers(model: ModelGraph, module: nn.Module, stack: LayerStack, results: Sequence[fx.Node],
                    chained: bool = False) -> list[Section]:
    """Prologue, layers in the order in which they run, epilogue. The epilogue computes `results`. `module`: the traced module.

    Values computed between two layers from an earlier one's output go to the front of the second. Totals over tokens that the
    model computes after the last layer, from every layer's values, are computed in the layers (`split.py`). A call's outputs go
    only to the next call. A value that is read later (an early layer's keys, an embedding added at the end) becomes one more
    output of every call in between. All calls may read the prologue's values without a gradient directly.

    Raises `CaptureError` if a layer reads nothing that an earlier call passes on; if `chained`, nothing that the call before it
    makes, or that is made from that.

    Does no dead-code elimination: Dynamo's graph still has in-place ops whose results nobody reads. It is safe after AOT, which
    makes the graph functional."""
    body = [n for n in model.graph.graph.nodes if n.op not in ("placeholder", "output") and n not in model.sources]
    found = layer_calls(model, module, stack)
    if chained:
        check_chain(body, found)
    cut = _Cut(model, body, [call.node for call in found], results)
    sections = [cut.prologue()]
    previous = cut.carried
    for stage, call in enumerate(found, 1):
        outputs = cut.handed_on(stage)
        sections.append(cut.layer(stage, call, previous, outputs))
        if not any(s.kind == "carried" for s in sections[-1].sources) and previous:
            raise CaptureError(f"{call.layer} does not read the output of the call before it: the layers must form a chain")
        previous = outputs
    sections.append(cut.epilogue(previous))
    return sections


class _Cut:
    """A model graph, divided into stages: 0 is the prologue, then come the layer calls, then the epilogue.

    State, made once: `members`, the nodes outside of layers by stage; `made_by`, the stage that makes each value; `last_read`,
    the last stage that reads it; the prologue's results that are handed on like a layer's (`carried`), and all of them, which
    any call may read (`shared`).
    """

    def __init__(self, model: ModelGraph, body: Sequence[fx.Node], calls: Sequence[fx.Node],
                 results: Sequence[fx.Node]) -> None:
        self.model, self.results, self.last = model, results, len(calls) + 1
        self.order = {node: position for position, node in enumerate(body)}
        self.members, self.made_by = _members([n for n in body if not _is_copied_to_readers(model, n)], calls)
        _move(self.members, self.made_by, made_in_layers(self.members[-1], self.made_by, model.sources, results, len(calls)))
        self.last_read = {value: stage for stage in range(self.last + 1) for value in self._reads(stage, calls)}
        outer = [n for n in self.members[0] if self.last_read.get(n, 0) > 0 and isinstance(n.meta["example_value"], Tensor)]
        self.carried = _carried_from_prologue(outer, calls, self.last_read)
        self.shared = [*self.carried, *(n for n in outer if n not in self.carried)]

    def _reads(self, stage: int, calls: Sequence[fx.Node]) -> list[fx.Node]:
        """The values of the model that a stage reads from outside, other than weights and inputs."""
        call = calls[stage - 1] if 0 < stage < self.last else None
        outside, _ = _outside(self.model, self.members[stage], self.results if stage == self.last else (), call)
        return [value for value in outside if value not in self.model.sources]

    def handed_on(self, stage: int) -> list[fx.Node]:
        """The outputs of a layer call: its own results, then the values that it passes on."""
        travelling = [n for n in self.last_read if self.made_by[n] <= stage < self.last_read[n]
                      and (n not in self.shared or n in self.carried)]
        return sorted(travelling, key=lambda n: (self.made_by[n] != stage, self.order[n]))

    def _source(self, stage: int, previous: Sequence[fx.Node], node: fx.Node) -> Source:
        """The source of a value that a stage does not make. `previous`: the values that the previous call passes on."""
        if node in self.model.sources:
            found = self.model.sources[node]
            return Source("random", index=stage) if found.kind == "random" else found
        if node in previous:
            return Source("carried", index=previous.index(node))
        assert node in self.shared, f"stage {stage} reads {node.name}, which nothing passes to it"
        return Source("shared", index=self.shared.index(node))

    def prologue(self) -> Section:
        return extract("prologue", self.model, self.members[0], self.shared,
                       functools.partial(self._source, 0, []), self.carried)

    def layer(self, stage: int, call: LayerCall, previous: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Section:
        return _layer_section(call, self.model, self.members[stage], previous, outputs,
                              functools.partial(self._source, stage, previous))

    def epilogue(self, previous: Sequence[fx.Node]) -> Section:
        return extract("epilogue", self.model, self.members[self.last], self.results,
                       functools.partial(self._source, self.last, previous), [])


def _members(body: Sequence[fx.Node], calls: Sequence[fx.Node]) -> tuple[list[list[fx.Node]], dict[fx.Node, int]]:
    """The nodes outside of layers that belong to each call, by stage, and the stage that makes each value. Stage 0 is the
    prologue, which also takes nodes between layers that read no layer's output. Then come the layers, then the epilogue. Raises
    `CaptureError` if the prologue would change a value in place before a layer that must read it unchanged, and for autocast
    around layers, which are traced alone."""
    members: list[list[fx.Node]] = [[] for _ in range(len(calls) + 2)]
    made_by: dict[fx.Node, int] = {}
    stage, autocasts, read = 1, 0, set[int]()
    for node in body:
        autocasts += {"_enter_autocast": 1, "_exit_autocast": -1}.get(called_name(node), 0)
        if node.target is INVOKE:
            if autocasts:
                raise CaptureError("the model runs its layers under torch.autocast, which streaming does not, not even with "
                                   "enabled=False: use autocast within the layers, or convert the model to the other dtype")
            made_by[node] = stage
            stage += 1
        elif node.target is operator.getitem and node.args[0] in calls:
            made_by[node] = made_by[node.args[0]]  # type: ignore[index]
        elif not (node.op == "get_attr" and node.users and all(u.target is INVOKE for u in node.users)):
            late = stage > len(calls) or any(made_by.get(a, 0) > 0 for a in node.all_input_nodes)
            made_by[node] = stage if late else 0
            if not late and writes(node) and not read.isdisjoint(_memory(node.all_input_nodes[:1])):
                raise CaptureError("the model changes a value in place between layers that an earlier layer has read: make a "
                                   f"new value instead{source_line(node)}")
            members[made_by[node]].append(node)
        if made_by.get(node):
            read |= _memory(node.all_input_nodes)
    return members, made_by


def _memory(values: Sequence[fx.Node]) -> set[int]:
    """Keys that identify the memory of these values."""
    tensors = (value.meta.get("example_value") for value in values)
    return {tensor.untyped_storage()._cdata for tensor in tensors if isinstance(tensor, Tensor)}


def _move(members: list[list[fx.Node]], made_by: dict[fx.Node, int], moved: Mapping[fx.Node, int]) -> None:
    """Moves nodes from the epilogue to the ends of earlier calls."""
    members[-1] = [node for node in members[-1] if node not in moved]
    for node, stage in moved.items():
        made_by[node] = stage
        members[stage].append(node)


def _layer_section(
    call: LayerCall, model: ModelGraph, around: Sequence[fx.Node], passing: Sequence[fx.Node],
    results: Sequence[fx.Node], source_of: Callable[[fx.Node], Source],
) -> Section:
    """The region that `call` invokes together with the nodes `around` it, before and after, in one graph that returns
    `results`: outputs of either, or values `passing` through."""
    passed_on = [n for n in results if n in passing]
    graph, copies, sources = _copied(model, around, passed_on, source_of, call.node)
    modules: dict[str, Any] = {n.target: getattr(model.graph, n.target, None) for n in graph.find_nodes(op="get_attr")}
    region = _region(model, call.node)
    modules |= {f"layer_{n.target}": getattr(region, n.target) for n in region.graph.find_nodes(op="get_attr")}
    graph.output(owned(graph, [copies[n] for n in results]))
    return Section(call.layer, LazyGraphModule(modules, graph), sources, [needs_gradient(n) for n in results],
                   [True] * len(results), visit=call.visit, own_names=call.own_names)


def _region(model: ModelGraph, call: fx.Node) -> fx.GraphModule:
    region: fx.GraphModule = getattr(model.graph, str(call.args[0].target))  # type: ignore[union-attr]
    return region


def _inlined(model: ModelGraph, call: fx.Node, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> dict[fx.Node, Any]:
    """Copies the region that `call` invokes to the end of `graph`; returns the call's results there."""
    region = _region(model, call)
    inner: dict[fx.Node, Any] = {}
    for node in region.graph.nodes:
        if node.op == "placeholder":
            argument = call.args[2 + len(inner)]
            inner[node] = copies[argument] if isinstance(argument, fx.Node) else argument
            if isinstance(inner[node], fx.Node) and inner[node].op == "placeholder" and needs_gradient(inner[node]) is (
                    needs_gradient(node)):  # else the region was traced for another call
                inner[node].meta = dict(node.meta)
            continue
        if node.op == "output":
            break
        inner[node] = graph.node_copy(node, inner.__getitem__)
        if node.op == "get_attr":
            inner[node].target = f"layer_{node.target}"
    (returned,) = region.graph.output_node().args
    return {n: inner[returned[n.args[1]]] for n in call.users}  # type: ignore[index]


def extract(
    name: str, model: ModelGraph, nodes: Sequence[fx.Node], results: Sequence[fx.Node],
    source_of: Callable[[fx.Node], Source], carried: Sequence[fx.Node],
) -> Section:
    """`nodes` in a separate graph. Values that they read from outside become placeholders."""
    graph, copies, sources = _copied(model, nodes, results, source_of)
    graph.output(owned(graph, [copies[n] for n in results]))
    return Section(name, LazyGraphModule(model.graph, graph), sources,
                   [needs_gradient(n) for n in results], [n in carried for n in results])


def _copied(
    model: ModelGraph, nodes: Sequence[fx.Node], results: Sequence[Any], source_of: Callable[[fx.Node], Source],
    call: fx.Node | None = None,
) -> tuple[fx.Graph, dict[fx.Node, fx.Node], list[Source]]:
    """A graph that computes `nodes`, including the region that `call` invokes, and contains `results`; the copies; the sources
    of its placeholders."""
    outside, along = _outside(model, nodes, results, call)
    inside = set(nodes)
    graph, copies = fx.Graph(), {}
    for node in outside:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in model.graph.graph.nodes:
        if node is call:
            copies |= _inlined(model, call, graph, copies)
        elif node in inside or node in along:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return graph, copies, [source_of(n) for n in outside]


def _outside(model: ModelGraph, nodes: Sequence[fx.Node], results: Sequence[Any],
             call: fx.Node | None = None) -> tuple[dict[fx.Node, None], set[fx.Node]]:
    """The values made elsewhere that `nodes`, `results` and the arguments of `call` read, in order; and the nodes that are
    copied along."""
    inside = {*nodes, *((call, *call.users) if call is not None else ())}
    arguments = call.args[2:] if call is not None else ()
    pending = [*(a for n in nodes for a in n.all_input_nodes), *(n for n in (*arguments, *results) if isinstance(n, fx.Node))]
    outside: dict[fx.Node, None] = {}
    along: set[fx.Node] = set()
    while pending:
        node = pending.pop(0)
        if node in inside or node in outside or node in along:
            continue
        if _is_copied_to_readers(model, node):
            along.add(node)
            pending.extend(node.all_input_nodes)
        else:
            outside[node] = None
    return outside, along


def _is_copied_to_readers(model: ModelGraph, node: fx.Node) -> bool:
    """True if a node is copied into each section that reads it: arithmetic on sizes, since calls do not exchange ints, and
    views of weights (such as a transpose that Dynamo moved out of a layer), since a call reads its weights itself."""
    if node in model.sources:
        return False
    value = node.meta.get("example_value")
    if isinstance(value, NUMBERS):
        return True
    weights = {n for n in node.all_input_nodes if n in model.sources and model.sources[n].kind in ("parameter", "buffer")}
    return isinstance(value, Tensor) and value._is_view() and bool(node.all_input_nodes) and all(
        n in weights or _is_copied_to_readers(model, n) for n in node.all_input_nodes)


def owned(graph: fx.Graph, results: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """The results, with views of other memory cloned: AOT refuses outputs that alias, and the view's base may be freed by the
    time the next call reads it."""
    owned = []
    for node in results:
        value = node.meta["example_value"]
        if isinstance(value, Tensor) and (value._is_view() or node.op == "placeholder"):
            copy = graph.call_method("clone", (node,))
            copy.meta = dict(node.meta)
            node = copy
        owned.append(node)
    return tuple(owned)


def _carried_from_prologue(
    outer: Sequence[fx.Node], calls: Sequence[fx.Node], last_read: dict[fx.Node, int]
) -> list[fx.Node]:
    """The prologue's results that serve as "the previous layer's output" for the first layer: those that need a gradient, and
    those of the shape of the first layer's output that nothing later reads (below frozen embeddings)."""
    shapes = [tuple(u.meta["example_value"].shape) for u in calls[0].users]
    return [n for n in outer if needs_gradient(n) or (
        n in calls[0].args[2:] and last_read[n] == 1 and tuple(n.meta["example_value"].shape) in shapes)]


def structural_key(section: Section, precision: Float8 | None = None) -> str:
    """Equal for two sections if and only if one graph serves both: ops, constants, and each placeholder's role, symbolic shape,
    stride, dtype, need of a gradient and whether `precision` keeps its products. Names of values, and of the layer itself, do
    not count otherwise."""
    number: dict[fx.Node, int] = {}
    lines = []
    for node in section.graph.graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
        if node.op == "placeholder":
            source, value = section.sources[len(number)], node.meta["example_value"]
            role = relative(source, section)
            described = value
            if isinstance(value, Tensor):
                described = tuple(value.shape), value.stride(), value.dtype, value.requires_grad
            # Which output of an earlier call feeds it belongs to the call, not to the graph.
            which = "" if source.kind in ("carried", "shared", "random") else f"{role.name} {role.index}"
            kept = " kept" if precision is not None and source.kind == "parameter" and precision.keeps(source.name) else ""
            lines.append(f"{role.kind} {which} {described}{kept}")
        elif node.op == "get_attr":
            nested = getattr(section.graph, str(node.target))
            if not isinstance(nested, fx.GraphModule):
                raise CaptureError(
                    f"{section.name} holds a constant tensor ({node.target}): register it as a buffer"
                    + source_line(node))
            lines.append(f"get_attr {nested.code}")  # the forward and backward of an autograd.Function
        else:
            lines.append(f"{node.op} {node.target} {arguments}")
        number[node] = len(number)
    return "\n".join(lines)


def relative(source: Source, section: Section) -> Source:
    """A layer's own parameter or buffer by its name in the layer: model.layers.3.mlp.up.weight is mlp.up.weight."""
    if source.kind not in ("parameter", "buffer"):
        return source
    for path in (section.name, section.layer):
        if path and source.name.startswith(path + "."):
            return Source(source.kind, source.name.removeprefix(path + "."))
    return Source(source.kind, section.own_names.get(source.name, source.name))
