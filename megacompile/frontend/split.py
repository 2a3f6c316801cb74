"""The model graph, cut at its layers: a prologue, one section for each layer call, an epilogue; and their equality."""
from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from megacompile.errors import CaptureError, UnsupportedError
from megacompile.frontend.layers import LayerStack
from megacompile.frontend.model_graph import ModelGraph
from megacompile.frontend.template import Source

INVOKE = torch.ops.higher_order.invoke_subgraph
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclasses.dataclass
class Section:
    """A piece of the model graph (Dynamo level). `sources[i]` feeds placeholder i; `carried[i]` says whether the next
    call reads result i, `has_gradient[i]` whether a gradient comes back for it."""

    name: str
    graph: fx.GraphModule
    sources: list[Source]
    has_gradient: list[bool]
    carried: list[bool]


def needs_gradient(node: fx.Node) -> bool:
    return bool(getattr(node.meta["example_value"], "requires_grad", False))


def split_at_layers(model: ModelGraph, stack: LayerStack, results: Sequence[fx.Node]) -> list[Section]:
    """Prologue, layers in order, epilogue; the epilogue computes `results`.

    Raises `CaptureError` where the layers are no chain, `UnsupportedError` where a value that needs a gradient is read
    by more than the call that follows. No dead-code elimination here: Dynamo's graph still has in-place ops whose
    results nobody reads. After AOT, which makes it functional, it is safe.
    """
    body = [n for n in model.graph.graph.nodes if n.op not in ("placeholder", "output") and n not in model.sources]
    calls = [n for n in body if n.target is INVOKE]
    _check_calls(model, stack, calls)
    layer_of = dict(zip(calls, stack.names, strict=True))
    layer_outputs = [n for n in body if n.target is operator.getitem and n.args[0] in layer_of]
    producer: dict[fx.Node, str] = {n: layer_of[n.args[0]] for n in layer_outputs}  # type: ignore[index]
    prologue, epilogue = _before_and_after(body, calls, producer)
    read_later = {a for call in calls for a in call.args[2:]} | {a for n in epilogue for a in n.all_input_nodes}
    shared = [n for n in prologue if n in read_later | set(results) and isinstance(n.meta["example_value"], Tensor)]
    carried = _carried_from_prologue(shared, calls, epilogue)
    shared.sort(key=lambda n: n not in carried)

    def source_of(reader: str, previous: Sequence[fx.Node]) -> Callable[[fx.Node], Source]:
        def source(node: fx.Node) -> Source:
            if node in model.sources:
                return model.sources[node]
            if node in previous:
                return Source("carried", index=previous.index(node))
            if node in shared and needs_gradient(node):
                raise UnsupportedError(
                    f"{reader} reads {node.name} of the prologue, which needs a gradient: only the first layer may "
                    f"read such a value, pass it on from layer to layer instead{source_line(node)}")
            if node in shared:
                return Source("shared", index=shared.index(node))
            raise CaptureError(
                f"{reader} reads an output of {producer.get(node, node.name)}, which is not the call before it: a "
                "layer's input must be the previous layer's output")
        return source

    sections = [extract("prologue", model, prologue, shared, source_of("the prologue", []), carried)]
    previous: list[fx.Node] = list(carried)
    for call, name in layer_of.items():
        used = sorted(call.users, key=lambda n: n.args[1])  # type: ignore[arg-type, return-value]
        sections.append(_layer_section(name, model, call, used, source_of(name, previous)))
        if previous and not any(s.kind == "carried" for s in sections[-1].sources):
            raise CaptureError(f"{name} does not read the output of the call before it: the layers must form a chain")
        previous = used
    sections.append(extract("epilogue", model, epilogue, results, source_of("the epilogue", previous), []))
    return sections


def _before_and_after(
    body: Sequence[fx.Node], calls: Sequence[fx.Node], producer: dict[fx.Node, str]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """The nodes of the prologue, also those that stand between layers but read none, and of the epilogue."""
    prologue: list[fx.Node] = []
    epilogue: list[fx.Node] = []
    last = body.index(calls[-1])
    for position, node in enumerate(body):
        is_region = node.op == "get_attr" and node.users and all(u.target is INVOKE for u in node.users)
        if node in producer or node.target is INVOKE or is_region:
            continue
        read = [producer[a] for a in node.all_input_nodes if a in producer]
        if position < last and read:
            raise CaptureError(
                f"{node.name} computes on the output of {read[0]} outside of a layer: move it into a layer's forward, "
                f"since a layer's input must be the previous layer's output{source_line(node)}")
        (epilogue if position > last else prologue).append(node)
    return prologue, epilogue


def _layer_section(
    name: str, model: ModelGraph, call: fx.Node, used: Sequence[fx.Node], source_of: Callable[[fx.Node], Source]
) -> Section:
    """The region that `call` invokes, with the results `used` alone."""
    region = getattr(model.graph, str(call.args[0].target))  # type: ignore[union-attr]
    graph = fx.Graph()
    flat: Any = graph.graph_copy(region.graph, {})
    graph.output(_owned(graph, [flat[n.args[1]] for n in used]))
    return Section(name, fx.GraphModule(region, graph), [source_of(n) for n in call.args[2:]],  # type: ignore[arg-type]
                   [needs_gradient(n) for n in used], [True] * len(used))


def extract(
    name: str, model: ModelGraph, nodes: Sequence[fx.Node], results: Sequence[fx.Node],
    source_of: Callable[[fx.Node], Source], carried: Sequence[fx.Node],
) -> Section:
    """Copy `nodes` into a graph of their own; what they read from outside becomes a placeholder.

    Arithmetic on sizes is copied along instead: a size is an int, which no call hands to another.
    """
    inside = set(nodes)
    pending = [*(a for n in nodes for a in n.all_input_nodes), *results]
    outside: dict[fx.Node, None] = {}
    sizes: set[fx.Node] = set()
    while pending:
        node = pending.pop(0)
        if node in inside or node in outside or node in sizes:
            continue
        if node not in model.sources and isinstance(node.meta.get("example_value"), _NUMBERS):
            sizes.add(node)
            pending.extend(node.all_input_nodes)
        else:
            outside[node] = None
    graph, copies = fx.Graph(), {}
    for node in outside:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in model.graph.graph.nodes:
        if node in inside or node in sizes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(_owned(graph, [copies[n] for n in results]))
    return Section(name, fx.GraphModule(model.graph, graph), [source_of(n) for n in outside],
                   [needs_gradient(n) for n in results], [n in carried for n in results])


def _owned(graph: fx.Graph, results: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """The results, those that view other memory cloned: AOT refuses outputs that alias, and the view's base may be gone
    by the time the next call reads it."""
    owned = []
    for node in results:
        value = node.meta["example_value"]
        if isinstance(value, Tensor) and (value._is_view() or node.op == "placeholder"):
            copy = graph.call_method("clone", (node,))
            copy.meta = dict(node.meta)
            node = copy
        owned.append(node)
    return tuple(owned)


def _check_calls(model: ModelGraph, stack: LayerStack, calls: Sequence[fx.Node]) -> None:
    """Each layer of the stack was called once, in order."""
    called = []
    for call in calls:
        names = [model.sources[n].name for n in call.args[2:] if isinstance(n, fx.Node) and n in model.sources]
        owners = {layer for layer in stack.names for name in names if name.startswith(layer + ".")}
        called.append(" and ".join(sorted(owners)) or "no layer")
    if called != list(stack.names):
        raise CaptureError(
            f"the layers of {stack.path} are not called once each, in order (called: {', '.join(called) or 'none'}): "
            'name the decoder stack with layers="path.to.layers"')


def _carried_from_prologue(
    shared: Sequence[fx.Node], calls: Sequence[fx.Node], epilogue: Sequence[fx.Node]
) -> list[fx.Node]:
    """The prologue's results that play the part of "the previous layer's output" for the first layer: those that need a
    gradient, and those of the first layer's output's shape that nothing later reads (below frozen embeddings)."""
    first, *rest = calls
    shapes = [tuple(u.meta["example_value"].shape) for u in first.users]
    later = {a for call in rest for a in call.args[2:]} | {a for n in epilogue for a in n.all_input_nodes}
    return [n for n in shared if n in first.args[2:] and (
        needs_gradient(n) or (n not in later and tuple(n.meta["example_value"].shape) in shapes))]


def source_line(node: fx.Node) -> str:
    """The user's source line that made `node`, as a continuation line of an error."""
    frames = [f.strip() for f in (node.meta.get("stack_trace") or "").splitlines()]
    frames = [f for f in frames if f.strip("^~ ")]
    places = [i for i, f in enumerate(frames) if f.startswith('File "') and "/torch/" not in f]
    return "\nfrom source: " + "  ".join(frames[places[-1]: places[-1] + 2]) if places else ""


def structural_key(section: Section) -> str:
    """Equal for two sections iff one graph serves both: ops, constants, and each placeholder's role, symbolic shape,
    stride, dtype and need of a gradient. Names of values, and of the layer itself, do not count."""
    number: dict[fx.Node, int] = {}
    lines = []
    for node in section.graph.graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
        if node.op == "placeholder":
            source, value = section.sources[len(number)], node.meta["example_value"]
            role = relative(source, section.name)
            described = value
            if isinstance(value, Tensor):
                described = tuple(value.shape), value.stride(), value.dtype, value.requires_grad
            # Which output of an earlier call feeds it is the call's business.
            which = "" if source.kind in ("carried", "shared") else f"{role.name} {role.index}"
            lines.append(f"{role.kind} {which} {described}")
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


def relative(source: Source, layer: str) -> Source:
    """A layer's own parameter or buffer by its name in the layer: model.layers.3.mlp.up.weight is mlp.up.weight."""
    if source.kind in ("parameter", "buffer") and source.name.startswith(layer + "."):
        return Source(source.kind, source.name.removeprefix(layer + "."))
    return source
