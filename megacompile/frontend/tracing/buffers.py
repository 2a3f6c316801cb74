"""Buffers that a forward writes before it reads them (the frequencies of LongRoPE): values of the forward, not its state."""
from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from megacompile.frontend.templates.template import Source

_COPIES = ("copy_", torch.Tensor.copy_, torch.ops.aten.copy_.default)


def own_rewritten_buffers(graph: fx.Graph, sources: Mapping[fx.Node, Source]) -> None:
    """Lets whoever reads such a buffer read what was written, in `graph`: a call of a template changes none of its inputs.

    The first to use the buffer must copy over the whole of it. So no earlier value can matter, to this forward or the next, and
    the model's own buffer may stay as it is. Buffers that are read first (running means) are left as they are, and refused.
    """
    order = {node: position for position, node in enumerate(graph.nodes)}
    for buffer in [node for node, source in sources.items() if source.kind == "buffer" and node.users]:
        first = min(buffer.users, key=order.__getitem__)
        if first.target not in _COPIES or first.args[0] is not buffer or buffer in first.args[1:]:
            continue
        with graph.inserting_before(first):
            written = graph.call_function(torch.ops.aten.copy.default, first.args[:2])
        written.meta = dict(first.meta)
        first.replace_all_uses_with(written)
        graph.erase_node(first)
        for reader in [user for user in buffer.users if user is not written]:
            reader.replace_input_with(buffer, written)
