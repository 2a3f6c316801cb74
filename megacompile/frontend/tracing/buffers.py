"""Buffers that a forward writes before it reads them (the frequencies of LongRoPE) are values of the forward, not its state."""
from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from megacompile.frontend.templates.template import Source

_COPIES = ("copy_", torch.Tensor.copy_, torch.ops.aten.copy_.default)


def own_rewritten_buffers(graph: fx.Graph, sources: Mapping[fx.Node, Source]) -> None:
    """Replaces, in `graph`, every read of a buffer that the forward rewrites by the value that was written: a call of a
    template changes none of its inputs.

    The first use of the buffer must overwrite all of it. Then no earlier value can matter to this forward or the next, and the
    model's own buffer stays unchanged. Buffers that are read first (running means) are left as they are, and refused later.
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
