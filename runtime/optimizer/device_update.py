"""`host_update.update` on a CUDA device with the same bits: a rule's code, compiled at run time with `csrc/update.cu`."""
from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from megacompile.ir.program import Lane
from megacompile.runtime.backends.lanes import Backend
from megacompile.runtime.optimizer.host_update import Moments, definitions, native_segment
from megacompile.runtime.optimizer.native import MOST_SCALARS
from megacompile.runtime.optimizer.rule import MatrixRule, Rule, Segment, direction_bytes, scratch_bytes
from megacompile.runtime.optimizer.state_format import BLOCK, FLOAT32

_SOURCE = Path(__file__).parent / "csrc"
PRELUDE = """
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef short int16_t; typedef unsigned int uint32_t;
typedef int int32_t; typedef long long int64_t;
#define INLINE __device__ __forceinline__
#define BITS __float_as_uint
#define FLOAT __uint_as_float
#define VALUE(number) ((number).value)

// CuPy always compiles with denormals flushed to zero. Inline instructions are not affected by that.
struct Exact {
  float value;
  INLINE explicit Exact(float number) : value(number) {}
};
#define BINARY(symbol, instruction)                                                          \\
  INLINE Exact operator symbol(Exact a, Exact b) {                                           \\
    float result;                                                                            \\
    asm(instruction ".rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a.value), "f"(b.value));      \\
    return Exact(result);                                                                    \\
  }
BINARY(+, "add")
BINARY(-, "sub")
BINARY(*, "mul")
BINARY(/, "div")
INLINE Exact FMA(Exact a, Exact b, Exact c) {
  float result;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a.value), "f"(b.value), "f"(c.value));
  return Exact(result);
}
INLINE Exact SQRT(Exact a) {
  float result;
  asm("sqrt.rn.f32 %0, %1;" : "=f"(result) : "f"(a.value));
  return Exact(result);
}
"""
_THREADS, _BLOCKS = 256, 4096  # a few waves of blocks on the largest devices; each thread loops


def source(text: str) -> str:
    """The kernel's CUDA source with these C++ definitions."""
    values, element, kernel = ((_SOURCE / name).read_text(encoding="utf-8") for name in ("values.h", "element.h", "update.cu"))
    return PRELUDE + values.replace("#pragma once\n", "") + text + element + kernel


@functools.cache
def _kernel(cupy: Any, text: str) -> Any:
    return cupy.RawModule(code=source(text), options=("--std=c++17",)).get_function("update_elements")


def update(cupy: Any, stream: Any, rule: Rule, weights: Tensor, remainder: Tensor | None, gradient: Tensor,
           segments: Sequence[tuple[Segment, Moments]], gradient_scale: float,
           judged: tuple[Tensor, Tensor] | None = None) -> None:
    """Issues the update to a CuPy stream. Tensors are as for `host_update.update`, on the current device, with gradients in the
    dtype of the weights. `judged`: the gradients' norms, fp32 [n], and a flag, int32 [1]. If a norm is not finite, the update
    changes nothing and sets the flag to 1."""
    assert weights.dtype == gradient.dtype, f"gradients are {gradient.dtype}, weights {weights.dtype}"
    tensors = [_pointer(tensor) for tensor in (weights, remainder, gradient)]
    norms, verdict = judged if judged is not None else (None, None)
    judging = _pointer(norms), numpy.int64(0 if norms is None else norms.numel()), _pointer(verdict)
    for segment, moments in merged(segments, exact=weights.dtype == torch.float32 or remainder is not None):
        assert not moments.format.scaled or segment.first % BLOCK == 0, f"{segment} divides a block that has one scale"
        kernel = _kernel(cupy, definitions(rule, weights.dtype, remainder is not None, moments.format))
        fields = native_segment(rule, segment, moments)
        state = [numpy.uint64(address or 0) for address in (*fields.moments, *fields.scales)]
        numbers = numpy.array(fields.scalars[:MOST_SCALARS], dtype=numpy.float32).view(_NUMBERS)
        each = BLOCK * _THREADS // 32 if moments.format.scaled else 4 * _THREADS
        blocks = max(1, min(_BLOCKS, -(-(segment.stop - segment.start) // each)))
        kernel((blocks,), (_THREADS,), (
            *tensors, *state, numpy.float32(gradient_scale), *judging, numpy.int64(segment.start), numpy.int64(segment.stop),
            numpy.int64(segment.first), numpy.uint32(fields.key), numbers[0]), stream=stream)


def merged(segments: Iterable[tuple[Segment, Moments]], exact: bool) -> list[tuple[Segment, Moments]]:
    """The segments, with those that follow each other in memory, and are updated alike, as one: issuing a kernel for each
    parameter takes longer than updating a small model. Moments in FP32 and `exact` masters take no random bits, which depend on
    the parameter. Only the addresses of the moments of a merged segment count."""
    found: list[tuple[Segment, Moments]] = []
    for pair in segments:
        if found and exact and _follows(found[-1], pair):
            found[-1] = replace(found[-1][0], stop=pair[0].stop), found[-1][1]
        else:
            found.append(pair)
    return found


def _follows(before: tuple[Segment, Moments], after: tuple[Segment, Moments]) -> bool:
    (first, kept), (second, moments) = before, after
    size = (first.stop - first.start) * FLOAT32.value_bytes
    return (kept.format == moments.format == FLOAT32 and first.stop == second.start
            and (first.options, first.step) == (second.options, second.step)
            and all(a.data_ptr() + size == b.data_ptr() for a, b in zip(kept.values, moments.values, strict=True)))


#: `Numbers` of update.cu. CuPy passes a structure as a NumPy scalar.
_NUMBERS = numpy.dtype([("at", numpy.float32, MOST_SCALARS)])


def _pointer(tensor: Tensor | None) -> Any:
    return numpy.uint64(0 if tensor is None else tensor.data_ptr())


# -------------------- Updates one matrix on the device by a `MatrixRule`
def matrices_of(rule: MatrixRule, segment: Segment) -> Iterator[tuple[Segment, int, int]]:
    """For each matrix of a parameter, its part of the segment, its rows and its columns. The segment is the whole parameter, or
    a run of its whole matrices."""
    start = segment.start
    for rows, columns in rule.matrices(segment.options):
        part = segment.within(start, start + rows * columns, start)
        assert part is not None, f"{rule.name}: matrices of another size than {segment}"
        yield replace(part, options=rule.options_for(segment.options, rows, columns)), rows, columns
        start += rows * columns
    assert start == segment.stop, f"{rule.name}: matrices of another size than {segment}"


@dataclass(frozen=True)
class WholeMatrix:
    """A matrix of which a rank updates a part. `momentum`: of all of it, bf16 [rows * columns]. `part`: its elements."""

    momentum: Tensor
    part: slice


def momentum_of(backend: Backend, rule: MatrixRule, gradient: Tensor, segment: Segment, moments: Moments,
                shape: tuple[int, int], gradient_scale: float, scratch: Tensor, lane: Lane) -> Tensor:
    """The momentum of a matrix of this shape, or of a part of it, fp32 [n] in `scratch`. Updates its moment in place. The
    arguments are those of `update_matrix`."""
    count = segment.stop - segment.start
    found = scratch[:4 * count].view(torch.float32)
    with backend.issuing(lane):
        single = scratch[direction_bytes(*shape):][:4 * count].view(torch.float32)  # until products need this memory
        single.copy_(gradient[segment.start:segment.stop])
    backend.update(rule.momentum, found, None, single, [(_at_zero(segment), moments)], gradient_scale, lane=lane)
    return found


def _at_zero(segment: Segment) -> Segment:
    found = segment.within(segment.start, segment.stop, 0)
    assert found is not None, "an empty matrix"
    return found


def update_matrix(backend: Backend, rule: MatrixRule, weights: Tensor, remainder: Tensor | None, gradient: Tensor,
                  segment: Segment, moments: Moments, shape: tuple[int, int], gradient_scale: float, scratch: Tensor,
                  lane: Lane, whole: WholeMatrix | None = None) -> None:
    """Updates weights, remainder and moment of a matrix in place. All tensors are on the device. The segment of weights and
    gradient, bf16 or fp32 [n], and of remainder, int16 [n] or None, is the matrix, or a part of `whole`. scratch: uint8
    [scratch_bytes]."""
    own = slice(segment.start, segment.stop)
    direction = momentum_of(backend, rule, gradient, segment, moments, shape, gradient_scale, scratch, lane)
    given, part = (direction, slice(None)) if whole is None else (whole.momentum, whole.part)
    with backend.issuing(lane):
        found = rule.direction(given.view(shape), segment.options, scratch[direction_bytes(*shape):]).reshape(-1)[part]
        # In the dtype of the weights, as gradients are.
        step = found if weights.dtype == torch.bfloat16 else direction.copy_(found)
    backend.update(rule.weights, weights[own], None if remainder is None else remainder[own], step,
                   [(_at_zero(segment), Moments(FLOAT32, ()))], 1.0, lane=lane)


def update_there(backend: Backend, rule: MatrixRule, weights: Tensor, remainder: Tensor | None, gradient: Tensor,
                 pairs: Sequence[tuple[Segment, Moments]], gradient_scale: float) -> None:
    """Updates parameters whose matrices stay on the device, with their state. Tensors are as for `update_matrix`. Segments
    index their elements."""
    found = [(part, moments, part.start - segment.start, (rows, columns)) for segment, moments in pairs
             for part, rows, columns in matrices_of(rule, segment)]
    with backend.issuing(Lane.COMPUTE):
        scratch = torch.empty(max(scratch_bytes(*shape) for *_, shape in found), dtype=torch.uint8, device=weights.device)
    for part, moments, start, shape in found:
        update_matrix(backend, rule, weights, remainder, gradient, part, moments.part(start, start + part.stop - part.start),
                      shape, gradient_scale, scratch, Lane.COMPUTE)
