"""Grouped products (all experts of a layer in one call) under inductor: their operands lie in memory as they were traced.

Groups of rows begin anywhere in an operand whose rows lie each in one piece. In its transpose they would have to begin at
multiples of 16 bytes, which the device checks; and inductor chooses how to lay out what it computes, as if that were the same.
"""
from __future__ import annotations

import torch
from torch import fx

from megacompile.torch_compat.inductor import inductor_prims


def keep_operands(graph: fx.Graph) -> None:
    """Has inductor keep the order of dimensions in which two-dimensional operands of grouped products were traced."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._grouped_mm.default):
        with graph.inserting_before(node):
            for position, operand in enumerate(node.args[:2]):
                if (value := operand.meta["val"]).dim() == 2:
                    kept = graph.call_function(inductor_prims.force_stride_order, (operand, value.stride()))
                    kept.meta = dict(operand.meta)
                    node.update_arg(position, kept)
