"""Updates a tile on the device chunk by chunk: a chunk is copied there, updated, and copied back to the host.

Everything is issued to one lane, in this order, chunk after chunk, and all chunks use the same memory: the lane's own order
keeps a chunk from being overwritten.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megacompile.ir.program import Lane
from megacompile.runtime.backends.lanes import Backend
from megacompile.runtime.memory.segments import Pair, at_home, moments_at_home
from megacompile.runtime.memory.shards import Share
from megacompile.runtime.optimizer.host_update import Moments
from megacompile.runtime.optimizer.rule import Rule, Segment
from megacompile.runtime.optimizer.state_format import BLOCK

#: Parts of a chunk begin at multiples of so many bytes.
_ALIGNED = 128


def visit(backend: Backend, rule: Rule, memory: Tensor, tile: Share, segments: Sequence[Segment],
          gradient_scale: float) -> None:
    """Updates a tile with the same bits as `host_update.update`. `memory`: uint8, on the device. `segments`: of the host tile.
    Returns once the last copy is issued to h2d; the host has the tile's new weights and state when that lane has finished the
    copy."""
    home, layout = tile.home, tile.home.layout
    assert home.gradients is not None and home.moments, f"{layout.name} has no optimizer state"
    gradients, weights = layout.flat(home.gradients), layout.flat(home.weights)
    pairs = [(run.start, pair) for _, run in tile.runs for pair in at_home(segments, tile, run)]
    for start, (segment, moments) in pairs:
        for part in _chunks(segment, moments, weights.element_size(), home.remainder is not None, memory.numel()):
            here = moments_at_home(part, tile)
            elements = slice(start + part.start, start + part.stop)
            # Gradients come first here: they are not copied back.
            host = [gradients[elements], weights[elements], *([] if home.remainder is None else [home.remainder[elements]]),
                    *here.values, *here.scales]
            there = list(_divided(memory, host))
            for away, kept in zip(there, host, strict=True):
                backend.copy(_bytes(away), _bytes(kept), Lane.H2D)
            backend.update(rule, *_of_chunk(there, part, here, home.remainder is not None), gradient_scale, lane=Lane.H2D)
            for away, kept in zip(there[1:], host[1:], strict=True):
                backend.copy(_bytes(kept), _bytes(away), Lane.H2D)


def _of_chunk(there: Sequence[Tensor], segment: Segment, moments: Moments,
              split: bool) -> tuple[Tensor, Tensor | None, Tensor, list[Pair]]:
    """Weights, remainder, gradients and segments of a chunk on the device."""
    gradients, weights, *rest = there
    remainder = rest.pop(0) if split else None
    count = len(moments.values)
    inside = segment.within(segment.start, segment.stop, 0)
    assert inside is not None, "an empty chunk"
    return weights, remainder, gradients, [(inside, Moments(moments.format, tuple(rest[:count]), tuple(rest[count:])))]


def _chunks(segment: Segment, moments: Moments, weight_bytes: int, split: bool, room: int) -> Iterator[Segment]:
    """The parts of a segment that fit `room` bytes each."""
    sizes = [weight_bytes, weight_bytes, *([2] if split else []), *(moments.format.value_bytes for _ in moments.values)]

    def needed(count: int) -> int:
        scales = [4 * moments.format.scales(count)] * len(moments.values)
        return sum(map(_aligned, [count * size for size in sizes] + scales))

    if needed(segment.stop - segment.start) <= room:
        yield segment
        return
    count = room // needed(BLOCK) * BLOCK
    assert count > 0, f"{room} bytes hold no chunk"
    # Blocks that have one scale begin at multiples of their size in the parameter.
    for start in range(segment.start - segment.first % BLOCK, segment.stop, count):
        if (part := segment.within(start, start + count, start)) is not None:
            yield part


def _divided(memory: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    """Tensors of the same sizes and dtypes in `memory`, one after the other."""
    start = 0
    for part in like:
        yield memory[start:start + part.nbytes].view(part.dtype)
        start += _aligned(part.nbytes)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED


def _bytes(elements: Tensor) -> Tensor:
    return elements.view(torch.uint8)
