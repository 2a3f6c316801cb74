"""Updates one matrix on the device by a `MatrixRule`."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megacompile.ir.program import Lane
from megacompile.runtime.backends.lanes import Backend
from megacompile.runtime.optimizer.host_update import Moments
from megacompile.runtime.optimizer.rule import MatrixRule, Segment, direction_bytes, scratch_bytes
from megacompile.runtime.optimizer.state_format import FLOAT32


def matrices_of(rule: MatrixRule, segment: Segment) -> Iterator[tuple[Segment, int, int]]:
    """The part of a parameter's segment for each of its matrices, with rows and columns. The segment is the whole parameter, or
    a run of whole matrices of it."""
    start = segment.start
    for rows, columns in rule.matrices(segment.options):
        part = segment.within(start, start + rows * columns, start)
        assert part is not None, f"{rule.name}: matrices of another size than {segment}"
        yield replace(part, options=rule.options_for(segment.options, rows, columns)), rows, columns
        start += rows * columns
    assert start == segment.stop, f"{rule.name}: matrices of another size than {segment}"


def update_matrix(backend: Backend, rule: MatrixRule, weights: Tensor, remainder: Tensor | None, gradient: Tensor,
                  segment: Segment, moments: Moments, shape: tuple[int, int], gradient_scale: float, scratch: Tensor,
                  lane: Lane) -> None:
    """Updates weights, remainder and moment of a matrix in place. All tensors are on the device. weights, gradient: bf16 or
    fp32 [n], and remainder: int16 [n] or None, of which the segment is the matrix. scratch: uint8 [scratch_bytes]."""
    own = slice(segment.start, segment.stop)
    count = segment.stop - segment.start
    direction = scratch[:4 * count].view(torch.float32)
    other = scratch[direction_bytes(*shape):]
    with backend.issuing(lane):
        single = other[:4 * count].view(torch.float32)  # until products of matrices need this memory
        single.copy_(gradient[own])
    at_zero = segment.within(segment.start, segment.stop, 0)
    assert at_zero is not None, "an empty matrix"
    backend.update(rule.momentum, direction, None, single, [(at_zero, moments)], gradient_scale, lane=lane)
    with backend.issuing(lane):
        found = rule.direction(direction.view(shape), segment.options, other)
        # In the dtype of the weights, as gradients are.
        step = found.reshape(-1) if weights.dtype == torch.bfloat16 else direction.copy_(found.reshape(-1))
    backend.update(rule.weights, weights[own], None if remainder is None else remainder[own], step,
                   [(at_zero, Moments(FLOAT32, ()))], 1.0, lane=lane)


def update_there(backend: Backend, rule: MatrixRule, weights: Tensor, remainder: Tensor | None, gradient: Tensor,
                 pairs: Sequence[tuple[Segment, Moments]], gradient_scale: float) -> None:
    """Updates parameters whose matrices stay on the device, with their state. Tensors are as for `update_matrix`; segments
    count their elements."""
    found = [(part, moments, part.start - segment.start, (rows, columns)) for segment, moments in pairs
             for part, rows, columns in matrices_of(rule, segment)]
    with backend.issuing(Lane.COMPUTE):
        scratch = torch.empty(max(scratch_bytes(*shape) for *_, shape in found), dtype=torch.uint8, device=weights.device)
    for part, moments, start, shape in found:
        update_matrix(backend, rule, weights, remainder, gradient, part, moments.part(start, start + part.stop - part.start),
                      shape, gradient_scale, scratch, Lane.COMPUTE)
