"""attention: chooses the kernel for each attention, for the target device.

Before: `megacompile.attention(q, k, v, scale, window, softcap, "neutral")`, and a model's own causal
`scaled_dot_product_attention`. After: both are `megacompile.attention` with the kernel's name as argument. Any other attention
is unchanged. With segments, rows hold padding or have a mask of every pair of tokens ("neutral"), or hold several sequences
("packed").

    flash_cpu     on the CPU, without a window or capped scores
    ..._packed    on the CPU: the kernel without segments, each sequence of a row by itself
    cudnn         on CUDA in bf16 or fp16, where the target has it: no windows, head sizes that are multiples of 8 up to 128
    flash         on CUDA in bf16 or fp16, windows too, head sizes that are multiples of 8 up to 256
    flash_packed  the same, each sequence of a row by itself
    efficient     the same with padding, as a mask [B, 1, T, T] that exists while a layer runs, or with a mask of
                  every pair; no windows
    math          everything else, on any device: explicit scores, softmax in float32
"""
from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from megacompile.ir.token_loop import example_of
from megacompile.passes.template import Target, copy_graph

name = "attention"
level = "model"

_SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def run(graph: fx.GraphModule, target: Target) -> fx.GraphModule:
    """`graph` with a kernel chosen for every causal attention."""
    result = copy_graph(graph)
    ours = torch.ops.megacompile.attention
    for node in list(result.graph.nodes):
        if node.target is F.scaled_dot_product_attention:
            _adopt(result.graph, node)
    for node in result.graph.nodes:
        if node.op == "call_function" and node.target in (ours, ours.default):
            query, _, _, _, window, softcap, form, *rest = node.args  # segments and sinks
            segmented = form if any(segments is not None for segments in rest[:1]) else ""
            node.args = (*node.args[:6], _kernel(example_of(query), target, window, softcap, segmented), *rest)
    result.recompile()
    return result


def _kernel(query: Tensor, target: Target, window: int, softcap: float, segmented: str) -> str:
    if target.device_type == "cpu":
        kernel = "math" if window or softcap or segmented == "neutral" else "flash_cpu"
        return f"{kernel}_packed" if segmented == "packed" else kernel
    width = query.shape[-1]
    half = query.dtype in (torch.bfloat16, torch.float16)
    if target.device_type != "cuda" or not half or softcap or width % 8 or width > 256:
        return "math"
    if segmented:
        return "flash_packed" if segmented == "packed" else "math" if window else "efficient"
    return "flash" if window or width > 128 else target.fused_attention


def _adopt(graph: fx.Graph, node: fx.Node) -> None:
    """Replaces a causal, unmasked, dropout-free `scaled_dot_product_attention` over [B, H, T, D] by our op."""
    given: dict[str, Any] = dict(zip(_SDPA_ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
    query, key, value = given["query"], given["key"], given["value"]
    shapes = [tuple(example_of(x).shape) for x in (query, key, value)]
    groups = given.get("enable_gqa", False)
    if (given.get("attn_mask") is not None or given.get("dropout_p", 0.0) != 0.0 or not given.get("is_causal", False)
            or any(len(shape) != 4 for shape in shapes) or shapes[1] != shapes[2]
            or shapes[0][2:] != shapes[1][2:] or (shapes[0] != shapes[1] and not groups)):
        return
    scale = given.get("scale")
    if scale is None:
        scale = shapes[0][3] ** -0.5
    with graph.inserting_before(node):
        call = graph.call_function(
            torch.ops.megacompile.attention.default, (query, key, value, float(scale), 0, 0.0, "neutral"))
        out = graph.call_function(operator.getitem, (call, 0))
        out.meta = dict(node.meta)
    node.replace_all_uses_with(out)
    graph.erase_node(node)
