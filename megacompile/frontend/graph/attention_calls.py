"""Attention in a model's graph: calls of our op, and the model's own attention under a mask of pairs, which is replaced by our
op; and what the model's modules declare about it."""
from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from megacompile.frontend.ops.mixer_ops import mixer_of
from megacompile.frontend.tracing.layers import LayerStack
from megacompile.frontend.tracing.model_graph import ModelGraph, called_name
from megacompile.ir.token_loop import example_of

#: Functions without which a layer has no attention of its own.
_OWN = ("matmul", "bmm", "baddbmm", "einsum", "scaled_dot_product_attention")

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def is_eager(model: Any, stack: LayerStack) -> bool:
    """True if layers of a transformers model run eager attention, according to the configs that they read."""
    configs = [module.config for layer in stack.layers for module in layer.modules() if hasattr(module, "config")]
    return any(getattr(config, "_attn_implementation", None) == "eager" for config in configs or [model.config])


def says_causal(stack: LayerStack) -> bool:
    """True if every list has layers whose modules declare `is_causal`, as those of transformers do, and all of them declare
    True. A config can override all of them (`is_causal=False`)."""
    layers = dict(zip(stack.names, stack.layers, strict=True))
    said = {path: [module.is_causal and getattr(getattr(module, "config", None), "is_causal", None) is not False
                   for name, layer in layers.items() if name.startswith(f"{path}.")
                   for module in layer.modules() if hasattr(module, "is_causal")] for path in stack.paths}
    return all(bool(each) and all(each) for each in said.values())


def all_layers_call_mixers(model: ModelGraph) -> bool:
    """True if every layer calls our attention or our other mixers, or has no attention."""
    return all(any(mixer_of(node.target) for node in region.graph.nodes)
               or not any(called_name(node) in _OWN for node in region.graph.nodes) for region in _regions(model))


def masks_pairs(model: ModelGraph) -> bool:
    """True if some layer's attention reads a mask of all pairs, which may let tokens see later ones."""
    given = [example_of(argument) for region in _regions(model) for call in _attentions(region)
             for argument in call.args[7:] if isinstance(argument, fx.Node)]
    return any(mask.dtype == torch.bool for mask in given)


def _attentions(region: fx.GraphModule) -> list[fx.Node]:
    target = torch.ops.megacompile.attention
    return [node for node in region.graph.nodes if node.target in (target, target.default)]


def _regions(model: ModelGraph) -> list[fx.GraphModule]:
    return [m for m in model.graph.children() if isinstance(m, fx.GraphModule)]


def adopt_masked_attention(model: ModelGraph) -> None:
    """Replaces each `scaled_dot_product_attention` without dropout whose mask is bool [B, 1 or H, T, T] by our op, in layers
    and around them. Our op holds no scores if the device has a kernel for it. Float masks are left to the model's own
    attention."""
    for module in (model.graph, *_regions(model)):
        for node in list(module.graph.nodes):
            if node.target is F.scaled_dot_product_attention:
                _adopt(model, module.graph, node)
        module.recompile()


def _adopt(model: ModelGraph, graph: fx.Graph, node: fx.Node) -> None:
    given: dict[str, Any] = dict(zip(_ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
    mask = given.get("attn_mask")
    if mask is None or given.get("dropout_p", 0.0) != 0.0 or given.get("is_causal", False):
        return
    query, key, value, seen = (example_of(given[name]) for name in _ARGUMENTS[:4])
    shapes = [tuple(map(str, x.shape)) for x in (query, key, value, seen)]  # as text: comparing symbols would add guards
    if any(len(shape) != 4 for shape in shapes) or shapes[1] != shapes[2] or seen.dtype != torch.bool:
        return
    batch, heads, length, width = shapes[0]
    grouped = given.get("enable_gqa", False)
    if (shapes[1] != (batch, shapes[1][1] if grouped else heads, length, width)
            or shapes[3] not in ((batch, "1", length, length), (batch, heads, length, length))
            or query.dtype not in (torch.float32, torch.bfloat16, torch.float16)):  # scores are float32
        return
    scale = given.get("scale")
    scale = query.shape[3] ** -0.5 if scale is None else scale
    with graph.inserting_before(node):
        arguments = (given["query"], given["key"], given["value"], float(scale), 0, 0.0, "neutral", mask)
        call = graph.call_function(torch.ops.megacompile.attention.default, arguments)
        out = graph.call_function(operator.getitem, (call, 0))
    call.meta, out.meta = dict(node.meta), dict(node.meta)
    with model.fakes:
        sums = query.new_empty(query.shape[:3], dtype=torch.float32)
    call.meta["example_value"] = (example_of(node), sums)
    node.replace_all_uses_with(out)
    graph.erase_node(node)
