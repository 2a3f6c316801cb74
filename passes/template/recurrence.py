"""recurrence: chooses the kernel for each recurrence and each short convolution, for the target device.

Before: `megacompile.recurrence(q, k, v, decay, beta, scale, "neutral", segments)` and `megacompile.causal_conv(x, weight, bias,
activation, "neutral", segments)`. After: the same with the kernel's name as argument.

    fla           on CUDA in bf16 or fp16, if flash-linear-attention 0.6 is installed (assumed where there is no CUDA); queries
                  of at most 256 channels, and decays of channels only for a delta rule
    reference     everything else, on any device: chunks of tokens in PyTorch, in float32
"""
from __future__ import annotations

import torch
from torch import Tensor, fx

from megacompile.compat import fla
from megacompile.ir.token_loop import example_of
from megacompile.passes.template import Target, copy_graph

name = "recurrence"
level = "model"

#: Where ops have their kernel among their arguments.
_KERNEL = {"recurrence": 6, "causal_conv": 4}


def run(graph: fx.GraphModule, target: Target) -> fx.GraphModule:
    """`graph` with a kernel chosen for every recurrence and short convolution."""
    result = copy_graph(graph)
    for called, position in _KERNEL.items():
        op = getattr(torch.ops.megacompile, called)
        for node in result.graph.nodes:
            if node.op == "call_function" and node.target in (op, op.default):
                kernel = _kernel(called, node, target)
                node.args = (*node.args[:position], kernel, *node.args[position + 1:])
    result.recompile()
    return result


def _kernel(called: str, node: fx.Node, target: Target) -> str:
    first: Tensor = example_of(node.args[0])
    fits = target.device_type == "cuda" and first.dtype in (torch.bfloat16, torch.float16)
    if called == "recurrence":
        fits &= first.shape[-1] <= 256 and (example_of(node.args[3]).dim() == 3 or node.args[4] is not None)
    return "fla" if fits and (fla.is_usable() or not torch.cuda.is_available()) else "reference"
