"""Grouped products (all experts of a layer in one call) under inductor: operands keep the memory layout that was traced.

In a row-major operand, a group of rows may begin at any row. In a transposed operand, groups would have to begin at multiples
of 16 bytes, which the device checks. Inductor may choose either layout for a value that it computes.
"""
from __future__ import annotations

import torch
from torch import fx

from megacompile.compat.inductor import inductor_prims


def keep_operands(graph: fx.Graph) -> None:
    """Makes inductor keep the traced strides of two-dimensional operands of grouped products. Changes `graph`."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._grouped_mm.default):
        with graph.inserting_before(node):
            for position, operand in enumerate(node.args[:2]):
                if (value := operand.meta["val"]).dim() == 2:
                    kept = graph.call_function(inductor_prims.force_stride_order, (operand, value.stride()))
                    kept.meta = dict(operand.meta)
                    node.update_arg(position, kept)
