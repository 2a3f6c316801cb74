"""Passes over one template's graph, each a module with `name`, `level` and `run(graph, target) -> graph`, pure.

`level` says what a pass sees:

    "model"    a section as traced by Dynamo, before differentiation: calls of torch functions, `meta["example_value"]`. In the
               module's `meta` of a layer: "weights", for each input the parameter's name in the model, or ""
    "variant"  a variant cut from the joint graph: aten and megacompile ops, `meta["val"]`, and in the module's `meta`:
               "gradients", ((input, (result,)), ...), the results that hold gradients, which a pass may rewrite, with a
               kernel's name as third item for products in float8,
               "parameters", the indices of the inputs that are parameters,
               "symbols", the shapes' symbols -> B and T, and "chunk", positions in a chunk of tokens, 0 for none

Passes name the megacompile ops through `torch.ops.megacompile`; the frontend, which made the graph, has registered them.
"""
from __future__ import annotations

import dataclasses

import torch
from torch import fx

from megacompile.compat.core import LazyGraphModule
from megacompile.ir.precision import Float8


@dataclasses.dataclass(frozen=True)
class Target:
    """The device and dtype with which a template will run; passes may depend on them.

    Attributes:
        fused_attention: the kernel on CUDA for causal attention without extras, "flash" or "cudnn".
        precision: the recipe for products in float8; None: all products are in `dtype`."""

    device_type: str
    dtype: torch.dtype
    fused_attention: str = "flash"
    precision: Float8 | None = None


def copy_graph(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of `module` to rewrite. Nodes and their `meta` are copied. Attributes are shared."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    copy = LazyGraphModule(module, graph)
    copy.meta.update(module.meta)
    return copy
