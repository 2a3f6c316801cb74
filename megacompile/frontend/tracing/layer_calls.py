"""Finds the calls of layers in a model's graph: the layer of each call, and which run of that layer it is."""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import fx, nn

from megacompile.errors import CaptureError
from megacompile.frontend.tracing.layers import LayerStack, stack_candidates
from megacompile.frontend.tracing.model_graph import INVOKE, ModelGraph


@dataclass(frozen=True)
class LayerCall:
    """`node` runs `layer` (its qualified name). `visit` is 1 on the layer's first run in a forward, 2 on its second.
    `own_names`: the layer's names of its parameters and buffers, by their names in the model. Shared ones have the name in
    another layer."""

    node: fx.Node
    layer: str
    visit: int
    own_names: Mapping[str, str]


def layer_calls(model: ModelGraph, module: nn.Module, stack: LayerStack) -> list[LayerCall]:
    """The layer calls of a graph, in order. `module`: the traced module. A call is identified by the weights that it reads.
    Modules of a layer's class that are in no list count as layers if they are called. Raises `CaptureError` if a layer is not
    called, or a call reads no weights."""
    nodes = [node for node in model.graph.graph.nodes if node.target is INVOKE]
    if not nodes and any("checkpoint" in str(node.target) for node in model.graph.graph.nodes):
        raise CaptureError(f"the layers of {stack} are called through torch.utils.checkpoint: call them as they are, "
                           "since what is recomputed is the plan's choice (checkpoint_interval)")
    names = _names_in_layers(module, stack)
    visits: Counter[str] = Counter()
    calls = []
    for node in nodes:
        read = {model.sources[n].name for n in node.args[2:] if isinstance(n, fx.Node) and n in model.sources}
        shares = {layer: len(read & own.keys()) for layer, own in names.items()}
        most = max(shares.values())
        if not most:
            raise CaptureError(f"a layer of {stack} is called that has no parameters, so that calls cannot be told apart: name "
                               'the list of layers whose weights are to stream with layers="path.to.layers"')
        # Among layers with the same weights, the one that has run least often.
        layer = min((name for name, share in shares.items() if share == most), key=visits.__getitem__)
        visits[layer] += 1
        calls.append(LayerCall(node, layer, visits[layer], names[layer]))
    if idle := [name for name in stack.names if not visits[name]]:
        others = ", ".join(f'"{path}"' for path in stack_candidates(module) if path not in stack.paths)
        lists = f"other lists: {others}" if others else "the model has no other list"
        raise CaptureError(f"{idle[0]} is not called in a forward (called: {', '.join(visits) or 'none'}): take it out of its "
                           f"list, or pass layers=(...) with the lists whose layers are called ({lists})")
    return calls


def _names_in_layers(module: nn.Module, stack: LayerStack) -> dict[str, dict[str, str]]:
    """For each layer: its parameters' and buffers' names in the model -> their names in the layer."""
    origin = {id(tensor): name for name, tensor in (*module.named_buffers(), *module.named_parameters())}
    classes = {type(layer) for layer in stack.layers}
    layers = dict(zip(stack.names, stack.layers, strict=True))
    layers |= {name: found for name, found in module.named_modules() if type(found) in classes and name not in layers}

    def tensors(layer: nn.Module) -> dict[str, str]:
        own = (*layer.named_buffers(), *layer.named_parameters())
        return {origin[id(tensor)]: name for name, tensor in own}

    return {name: tensors(layer) for name, layer in layers.items()}


def check_chain(body: Sequence[fx.Node], calls: Sequence[LayerCall]) -> None:
    """Raises `CaptureError` if a call does not depend on what the call before it makes. Lists of embeddings or heads, and
    parallel encoders, are called once each as well, but form no chain."""
    for before, call in pairwise(calls):
        reached = {before.node}
        for node in body[body.index(before.node) + 1:body.index(call.node) + 1]:
            if reached.intersection(node.all_input_nodes):
                reached.add(node)
        if call.node not in reached:
            raise CaptureError(f"{call.layer} does not read what {before.layer} makes: the layers must form a chain")


def source_line(node: fx.Node) -> str:
    """The user's source line that made `node`, as a continuation line of an error; "" if it is unknown."""
    frames = [f.strip() for f in (node.meta.get("stack_trace") or "").splitlines()]
    frames = [f for f in frames if f.strip("^~ ")]
    own = [i for i, f in enumerate(frames) if f.startswith('File "') and "/torch/" not in f]
    return "\nfrom source: " + "  ".join(frames[own[-1]: own[-1] + 2]) if own else ""
