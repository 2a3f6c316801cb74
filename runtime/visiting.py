"""Updates a tile on the device chunk by chunk: a chunk is copied there, updated, and copied back to the host. A rule of whole
matrices has one of them in each chunk, with memory for its products.

Everything is issued to one lane, in this order, chunk after chunk, and all chunks use the same memory: the lane's own order
keeps a chunk from being overwritten.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megacompile.ir.program import Lane
from megacompile.runtime.backends.lanes import Backend
from megacompile.runtime.memory.segments import Pair, at_home, moments_at_home
from megacompile.runtime.memory.shards import Share
from megacompile.runtime.memory.state_layout import aligned_bytes
from megacompile.runtime.optimizer.host_update import Moments
from megacompile.runtime.optimizer.matrix_update import matrices_of, update_matrix
from megacompile.runtime.optimizer.rule import MatrixRule, Rule, Segment
from megacompile.runtime.optimizer.state_format import BLOCK


def visit(backend: Backend, rule: Rule, memory: Tensor, tile: Share, segments: Sequence[Segment],
          gradient_scale: float) -> None:
    """Updates a tile with the same bits as `host_update.update`. `memory`: uint8, on the device. `segments`: of the host tile.
    Returns once the last copy is issued to h2d; the host has the tile's new weights and state when that lane has finished the
    copy."""
    weights, split = tile.home.layout.flat(tile.home.weights), tile.home.remainder is not None
    for start, (segment, moments) in _at_home(tile, segments):
        for part in _chunks(segment, moments, weights.element_size(), split, memory.numel()):
            with _away(backend, memory, tile, part, start) as (there, here, _):
                backend.update(rule, *_of_chunk(there, part, here, split), gradient_scale, lane=Lane.H2D)


def visit_matrices(backend: Backend, rule: MatrixRule, memory: Tensor, tile: Share, segments: Sequence[Segment],
                   gradient_scale: float) -> None:
    """As `visit`, for segments that are whole matrices. `memory` holds the largest matrix (`TileLayout.visit_bytes`)."""
    split = tile.home.remainder is not None
    for start, (segment, _) in _at_home(tile, segments):
        for part, *shape in matrices_of(rule, segment):
            with _away(backend, memory, tile, part, start) as (there, here, scratch):
                weights, remainder, gradient, [(inside, moments)] = _of_chunk(there, part, here, split)
                update_matrix(backend, rule, weights, remainder, gradient, inside, moments, (shape[0], shape[1]),
                              gradient_scale, scratch, Lane.H2D)


def _at_home(tile: Share, segments: Sequence[Segment]) -> list[tuple[int, Pair]]:
    """The parts of segments in each run of a tile, each with the first element of its run in the host tile."""
    assert tile.home.gradients is not None and tile.home.moments, f"{tile.home.layout.name} has no optimizer state"
    return [(run.start, pair) for _, run in tile.runs for pair in at_home(segments, tile, run)]


@contextmanager
def _away(backend: Backend, memory: Tensor, tile: Share, part: Segment,
          start: int) -> Iterator[tuple[list[Tensor], Moments, Tensor]]:
    """A chunk on the device: gradients, weights, the remainder if there is one, moments and scales; its moments at home; and
    the rest of the memory. The chunk is copied there at the beginning, and all but the gradients are copied back at the end."""
    home, layout = tile.home, tile.home.layout
    assert home.gradients is not None, f"{layout.name} has no gradients"
    elements = slice(start + part.start, start + part.stop)
    here = moments_at_home(part, tile)
    host = [layout.flat(home.gradients)[elements], layout.flat(home.weights)[elements],
            *([] if home.remainder is None else [home.remainder[elements]]), *here.values, *here.scales]
    there = list(_divided(memory, host))
    for away, kept in zip(there, host, strict=True):
        backend.copy(_bytes(away), _bytes(kept), Lane.H2D)
    yield there, here, memory[sum(aligned_bytes(each.nbytes) for each in host):]
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
        return sum(map(aligned_bytes, [count * size for size in sizes] + scales))

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
        start += aligned_bytes(part.nbytes)


def _bytes(elements: Tensor) -> Tensor:
    return elements.view(torch.uint8)
