"""The model graph, cut at its layers: a prologue, one section for each layer call, an epilogue; and their equality."""
from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence

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
    graph = model.graph.graph
    body = [n for n in graph.nodes if n.op not in ("placeholder", "output") and n not in model.sources]
    calls = [n for n in body if n.target is INVOKE]
    _check_calls(model, stack, calls)
    call_of = {n: n.args[0] for n in body if n.target is operator.getitem and n.args[0] in calls}
    regions = {n for n in body if n.op == "get_attr" and n.users and all(u.target is INVOKE for u in n.users)}
    prologue, epilogue = [], []
    last = body.index(calls[-1])
    for position, node in enumerate(body):
        if node in call_of or node in regions or node.target is INVOKE:
            continue
        if position > last:
            epilogue.append(node)
        elif any(a in call_of for a in node.all_input_nodes):
            before = stack.names[calls.index(call_of[next(a for a in node.all_input_nodes if a in call_of)])]
            raise CaptureError(
                f"{node.name} computes on the output of {before} outside of a layer: move it into the layer's forward, "
                f"a layer's input must be the previous layer's output{source_line(node)}")
        else:  # also what stands between two layers but reads none, e.g. a hoisted view of a weight
            prologue.append(node)

    before_layers = set(prologue)
    used = {call: sorted(call.users, key=lambda n: n.args[1]) for call in calls}  # type: ignore[arg-type, return-value]
    inputs = {call: [n for n in call.args[2:]] for call in calls}
    shared = _prologue_results(model, before_layers, inputs, calls, epilogue)
    carried_in = _carried_from_prologue(shared, inputs[calls[0]], calls, epilogue)
    shared.sort(key=lambda n: n not in carried_in)

    def source_of(reader: str, previous: Sequence[fx.Node]) -> Callable[[fx.Node], Source]:
        def source(node: fx.Node) -> Source:
            if node in model.sources:
                return model.sources[node]
            if node in previous:
                return Source("carried", index=list(previous).index(node))
            if node in shared and needs_gradient(node):
                raise UnsupportedError(
                    f"{reader} reads {node.name} of the prologue, which needs a gradient: only the first layer may read "
                    f"such a value, pass it on from layer to layer instead{source_line(node)}")
            if node in shared:
                return Source("shared", index=shared.index(node))
            producer = stack.names[calls.index(call_of[node])] if node in call_of else node.name
            raise CaptureError(
                f"{reader} reads an output of {producer}, which is not the call before it: a layer's input must be the "
                "previous layer's output")
        return source

    sections = [extract("prologue", model, prologue, shared, source_of("the prologue", []), carried_in)]
    previous: list[fx.Node] = list(carried_in)
    for name, call in zip(stack.names, calls, strict=True):
        region = getattr(model.graph, call.args[0].target)  # type: ignore[union-attr]
        inner = fx.Graph()
        flat = inner.graph_copy(region.graph, {})
        inner.output(tuple(flat[n.args[1]] for n in used[call]))  # type: ignore[index] # only what somebody reads
        source = source_of(name, previous)
        sources = [source(n) for n in inputs[call]]  # type: ignore[arg-type]
        if previous and not any(s.kind == "carried" for s in sources):
            raise CaptureError(f"{name} does not read the output of the call before it: the layers must form a chain")
        sections.append(Section(name, fx.GraphModule(region, inner), sources, [needs_gradient(n) for n in used[call]],
                                [True] * len(used[call])))
        previous = used[call]
    sections.append(extract("epilogue", model, epilogue, results, source_of("the epilogue", previous), []))
    return sections


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
    graph.output(tuple(copies[n] for n in results))
    return Section(name, fx.GraphModule(model.graph, graph), [source_of(n) for n in outside],
                   [needs_gradient(n) for n in results], [n in carried for n in results])


def _check_calls(model: ModelGraph, stack: LayerStack, calls: Sequence[fx.Node]) -> None:
    """Each layer of the stack was called once, in order."""
    called = []
    for call in calls:
        names = [model.sources[n].name for n in call.args[2:] if isinstance(n, fx.Node) and n in model.sources]
        owners = {layer for layer in stack.names for name in names if name.startswith(layer + ".")}
        called.append(min(owners, key=stack.names.index) if len(owners) == 1 else ", ".join(sorted(owners)) or "no layer")
    if called != list(stack.names):
        raise CaptureError(
            f"the layers of {stack.path} are not called once each, in order (called: {', '.join(called) or 'none'}): name "
            'the decoder stack with layers="path.to.layers"')


def _prologue_results(
    model: ModelGraph, before_layers: set[fx.Node], inputs: dict[fx.Node, list[fx.Node]], calls: Sequence[fx.Node],
    epilogue: Sequence[fx.Node],
) -> list[fx.Node]:
    """Tensors of the prologue that anything later reads."""
    later = {a for call in calls for a in inputs[call]} | {a for n in epilogue for a in n.all_input_nodes}
    later |= set(model.results)
    return [n for n in model.graph.graph.nodes
            if n in before_layers and n in later and isinstance(n.meta["example_value"], Tensor)]


def _carried_from_prologue(
    shared: Sequence[fx.Node], first_inputs: Sequence[fx.Node], calls: Sequence[fx.Node], epilogue: Sequence[fx.Node]
) -> list[fx.Node]:
    """The prologue's results that play the part of "the previous layer's output" for the first layer: those that need a
    gradient, and those of the first layer's output's shape that nothing later reads (below frozen embeddings)."""
    first, *rest = calls
    shapes = [tuple(u.meta["example_value"].shape) for u in first.users]
    later = {a for call in rest for a in call.args[2:]} | {a for n in epilogue for a in n.all_input_nodes}
    return [n for n in shared if n in first_inputs and (
        needs_gradient(n) or (n not in later and tuple(n.meta["example_value"].shape) in shapes))]


def source_line(node: fx.Node) -> str:
    """The user's source line that made `node`, as a continuation line of an error."""
    frames = [f.strip() for f in (node.meta.get("stack_trace") or "").splitlines() if f.strip() and set(f.strip()) != {"^"}]
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
            described = (tuple(value.shape), value.stride(), value.dtype, value.requires_grad) if isinstance(value, Tensor) else value
            # Which output of an earlier call feeds it is the call's business.
            which = "" if source.kind in ("carried", "shared") else f"{role.name} {role.index}"
            lines.append(f"{role.kind} {which} {described}")
        elif node.op == "get_attr":
            raise CaptureError(
                f"{section.name} holds a constant tensor or a nested graph ({node.target}): register the tensor as a "
                f"buffer, and use no higher-order ops inside layers{source_line(node)}")
        else:
            lines.append(f"{node.op} {node.target} {arguments}")
        number[node] = len(number)
    return "\n".join(lines)


def relative(source: Source, layer: str) -> Source:
    """A layer's own parameter or buffer under its name within the layer: model.layers.3.mlp.up.weight is mlp.up.weight."""
    if source.kind in ("parameter", "buffer") and source.name.startswith(layer + "."):
        return Source(source.kind, source.name.removeprefix(layer + "."))
    return source
