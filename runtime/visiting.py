"""Updates a tile on the device chunk by chunk: a chunk is copied there, updated, and copied back to the host.

Everything is issued to one lane, in this order, chunk after chunk, and all chunks use the same memory: the lane's own order
keeps a chunk from being overwritten.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megacompile.ir.program import Lane
from megacompile.runtime.backends.lanes import Backend
from megacompile.runtime.memory.shards import Share
from megacompile.runtime.memory.tiles import ALIGNMENT
from megacompile.runtime.optimizer.adam import AdamSegment


def visit(backend: Backend, memory: Tensor, tile: Share, segments: Sequence[AdamSegment],
          gradient_scale: float) -> None:
    """Updates a tile with the same bits as `adam.adamw`. `memory`: uint8, on the device. `segments`: of the host tile. Returns
    once the last copy is issued to h2d; the host has the tile's new weights and state when that lane has finished the copy."""
    home, layout = tile.home, tile.home.layout
    assert home.gradients is not None and home.m is not None and home.v is not None, f"{layout.name} has no optimizer state"
    # Gradients come first here: they are not copied back.
    host = [layout.flat(home.gradients), layout.flat(home.weights), home.m, home.v,
            *([] if home.remainder is None else [home.remainder])]
    count = memory.numel() // sum(part.element_size() for part in host) // ALIGNMENT * ALIGNMENT
    assert count, f"{memory.numel()} bytes hold no chunk of {layout.name}"
    there = list(_divided(memory, [part.dtype for part in host], count))
    for start, stop in _chunks(tile, count):
        inside = [replace(s, start=max(s.start, start) - start, stop=min(s.stop, stop) - start) for s in segments
                  if s.start < stop and start < s.stop]
        if not inside:
            continue  # nothing in this chunk is trained
        pairs = [(away[:stop - start], here[start:stop]) for away, here in zip(there, host, strict=True)]
        for away, here in pairs:
            backend.copy(_bytes(away), _bytes(here), Lane.H2D)
        gradients, weights, m, v, *low = (away for away, _ in pairs)
        backend.adamw(weights, low[0] if low else None, gradients, m, v, inside, gradient_scale, lane=Lane.H2D)
        for away, here in pairs[1:]:
            backend.copy(_bytes(here), _bytes(away), Lane.H2D)


def _chunks(tile: Share, count: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of elements of the host tile, at most `count` each. Only this tile's: others may be in an update."""
    for _, run in tile.runs:
        for start in range(run.start, run.stop, count):
            yield start, min(start + count, run.stop)


def _divided(memory: Tensor, dtypes: Sequence[torch.dtype], count: int) -> Iterator[Tensor]:
    """`count` elements of each dtype, one after the other."""
    start = 0
    for dtype in dtypes:
        stop = start + count * dtype.itemsize
        yield memory[start:stop].view(dtype)
        start = stop


def _bytes(elements: Tensor) -> Tensor:
    return elements.view(torch.uint8)
