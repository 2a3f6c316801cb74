"""The optimizer's arithmetic on flat host tensors: AdamW, gradient norm, accumulation, FP32 master split and join.

The kernels are in `csrc/adam.cpp`: one pass over memory, and the same bits for any number of threads and any instruction
set. Where they cannot be built, blocked PyTorch operations give the same results within 1 ulp.

Tensors are one-dimensional, contiguous and on the CPU. The master of a bf16 weight is an exact FP32 value whose bits
are (weight << 16) + remainder; the weight is the master rounded to nearest, ties away from zero. A NaN is stored as
the canonical NaN, with remainder 0.

`threads` defaults to `native.default_threads()`, `instruction_set` to the best one (tests force others). The PyTorch path
ignores both.
"""
from __future__ import annotations

import ctypes
import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megacompile.runtime.optimizer import native

_DTYPES = {torch.float32: native.FLOAT32, torch.bfloat16: native.BFLOAT16}
_CANONICAL_NAN = 0x7FC00000
_BLOCK = 1 << 20  # elements that the PyTorch path processes at a time; bounds its temporary memory
_NORM_BLOCK = 16384  # kChunk of adam.cpp. PyTorch sums so few elements in one thread, so in a fixed order


class Part(enum.IntEnum):
    """Which part of an update is stored. Storing the weights, then the moments, gives the same bits as the whole. The next
    forward needs only the weights, which are two thirds of the traffic."""

    WHOLE = 0
    WEIGHTS = 1
    MOMENTS = 2


@dataclass(frozen=True)
class AdamSegment:
    """Elements [start, stop) of a tile that share hyper-parameters. `step` counts from 1, this update included."""

    start: int
    stop: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int

    @property
    def step_size(self) -> float:
        return self.lr / (1 - self.beta1**self.step)

    @property
    def root_correction(self) -> float:
        return float((1 - self.beta2**self.step) ** 0.5)


def adamw(
    weights: Tensor,
    remainder: Tensor | None,
    gradient: Tensor,
    m: Tensor,
    v: Tensor,
    segments: Sequence[AdamSegment],
    gradient_scale: float = 1.0,
    threads: int | None = None,
    instruction_set: str | None = None,
    part: Part = Part.WHOLE,
) -> None:
    """Updates weights, remainder and moments in place, or `part` of them: `torch.optim.AdamW` on the FP32 master in one pass.

    weights: bf16 [n] with remainder int16 [n], or fp32 [n] with remainder None. gradient: bf16 or fp32 [n].
    m, v: fp32 [n]. The gradient is multiplied in FP32 by `gradient_scale`, the clipping coefficient, and not changed.
    Segments must be ascending and disjoint; elements outside all of them keep their values.
    """
    _check("weights", weights, weights.numel(), torch.float32, torch.bfloat16)
    _check("gradient", gradient, weights.numel(), torch.float32, torch.bfloat16)
    _check("m", m, weights.numel(), torch.float32)
    _check("v", v, weights.numel(), torch.float32)
    assert (remainder is not None) == (weights.dtype == torch.bfloat16), "bf16 weights, and only they, have a remainder"
    if remainder is not None:
        _check("remainder", remainder, weights.numel(), torch.int16)
    end = 0
    for segment in segments:
        assert end <= segment.start <= segment.stop <= weights.numel(), f"{segment} starts before {end} or is too long"
        assert segment.step >= 1, f"{segment}: steps count from 1"
        end = segment.stop

    library = native.library()
    if library is None:
        for segment in segments:
            for block in _blocks(segment.start, segment.stop):
                low = remainder[block] if remainder is not None else None
                _adamw_block(weights[block], low, gradient[block], m[block], v[block], segment, gradient_scale, part)
        return
    table = (native.Segment * len(segments))(*(native_segment(segment) for segment in segments))
    library.megacompile_adamw(
        weights.data_ptr(),
        None if remainder is None else remainder.data_ptr(),
        gradient.data_ptr(),
        _DTYPES[gradient.dtype],
        m.data_ptr(),
        v.data_ptr(),
        ctypes.addressof(table),
        len(segments),
        gradient_scale,
        part,
        *_execution(library, threads, instruction_set),
    )


def squared_norm(gradient: Tensor, threads: int | None = None, instruction_set: str | None = None) -> float:
    """Sum of the squares of a bf16 or fp32 [n] tensor, in double precision. NaN and inf propagate.

    The order of the sum depends only on n, so threads and instruction set do not change a bit.
    """
    _check("gradient", gradient, gradient.numel(), torch.float32, torch.bfloat16)
    library = native.library()
    if library is None:
        return sum((float(block.double().square().sum()) for block in torch.split(gradient, _NORM_BLOCK)), 0.0)
    partials = torch.empty(gradient.numel() // library.megacompile_chunk_elements() + 1, dtype=torch.float64)
    return float(
        library.megacompile_squared_norm(
            gradient.data_ptr(),
            _DTYPES[gradient.dtype],
            gradient.numel(),
            partials.data_ptr(),
            *_execution(library, threads, instruction_set),
        )
    )


def norm(gradient: Tensor, threads: int | None = None, instruction_set: str | None = None) -> float:
    """Euclidean norm of a bf16 or fp32 [n] tensor: the square root of `squared_norm`."""
    return math.sqrt(squared_norm(gradient, threads, instruction_set))


def accumulate(
    destination: Tensor,
    source: Tensor,
    overwrite: bool,
    threads: int | None = None,
    instruction_set: str | None = None,
) -> None:
    """destination += source, or destination = source with `overwrite`; both [n], each bf16 or fp32.

    The sum is taken in FP32 and rounded to the destination's dtype, to nearest, ties to even.
    """
    _check("destination", destination, destination.numel(), torch.float32, torch.bfloat16)
    _check("source", source, destination.numel(), torch.float32, torch.bfloat16)
    if overwrite and destination.dtype == source.dtype:
        copy(destination, source, threads)
        return
    library = native.library()
    if library is None:
        for block in _blocks(0, destination.numel()):
            addend = source[block].float()
            destination[block] = addend if overwrite else destination[block].float() + addend
        return
    library.megacompile_accumulate(
        destination.data_ptr(),
        _DTYPES[destination.dtype],
        source.data_ptr(),
        _DTYPES[source.dtype],
        destination.numel(),
        overwrite,
        *_execution(library, threads, instruction_set),
    )


def split_fp32(
    master: Tensor, threads: int | None = None, instruction_set: str | None = None
) -> tuple[Tensor, Tensor]:
    """(weights bf16 [n], remainder int16 [n]) of an fp32 [n] master. Exact except for the payloads of NaNs."""
    _check("master", master, master.numel(), torch.float32)
    weights = torch.empty(master.numel(), dtype=torch.bfloat16)
    remainder = torch.empty(master.numel(), dtype=torch.int16)
    library = native.library()
    if library is None:
        for block in _blocks(0, master.numel()):
            _split_block(master[block], weights[block], remainder[block])
    else:
        library.megacompile_split(
            master.data_ptr(),
            weights.data_ptr(),
            remainder.data_ptr(),
            master.numel(),
            *_execution(library, threads, instruction_set),
        )
    return weights, remainder


def join_fp32(
    weights: Tensor, remainder: Tensor, threads: int | None = None, instruction_set: str | None = None
) -> Tensor:
    """The fp32 [n] master of bf16 [n] weights and their int16 [n] remainder. Exact."""
    _check("weights", weights, weights.numel(), torch.bfloat16)
    _check("remainder", remainder, weights.numel(), torch.int16)
    master = torch.empty(weights.numel(), dtype=torch.float32)
    library = native.library()
    if library is None:
        for block in _blocks(0, weights.numel()):
            master[block] = _join_block(weights[block], remainder[block])
    else:
        library.megacompile_join(
            weights.data_ptr(),
            remainder.data_ptr(),
            master.data_ptr(),
            weights.numel(),
            *_execution(library, threads, instruction_set),
        )
    return master


def copy(destination: Tensor, source: Tensor, threads: int | None = None) -> None:
    """Copies bits between two [n] tensors of one dtype, any dtype, that do not overlap."""
    _check("destination", destination, source.numel(), source.dtype)
    _check("source", source, source.numel(), source.dtype)
    library = native.library()
    if library is None:
        destination.copy_(source)
        return
    library.megacompile_copy(
        destination.data_ptr(),
        source.data_ptr(),
        source.numel() * source.element_size(),
        native.default_threads() if threads is None else threads,
    )


def _check(name: str, tensor: Tensor, elements: int, *dtypes: torch.dtype) -> None:
    assert tensor.device.type == "cpu" and tensor.dim() == 1 and tensor.is_contiguous(), (
        f"{name} is {tuple(tensor.shape)} on {tensor.device}: the kernels take flat contiguous host memory"
    )
    assert tensor.dtype in dtypes, f"{name} is {tensor.dtype}, not one of {dtypes}"
    assert tensor.numel() == elements, f"{name} has {tensor.numel()} elements, not {elements}"


def _execution(library: ctypes.CDLL, threads: int | None, instruction_set: str | None) -> tuple[int, int]:
    """The last two arguments of every kernel: the instruction set's number and the number of threads."""
    available = native.instruction_sets(library)
    chosen = available[-1] if instruction_set is None else instruction_set
    assert chosen in available, f"this processor runs {available}, not {chosen}"
    return native.INSTRUCTION_SETS.index(chosen), native.default_threads() if threads is None else threads


def native_segment(segment: AdamSegment) -> native.Segment:
    """The FP32 scalars of torch.optim.AdamW: computed in double precision and rounded once."""
    root_correction = ctypes.c_float(segment.root_correction).value
    inverse = ctypes.c_float(1 / root_correction).value
    return native.Segment(
        start=segment.start,
        stop=segment.stop,
        decay=1 - segment.lr * segment.weight_decay,
        gradient_weight=1 - segment.beta1,
        beta2=segment.beta2,
        square_weight=1 - segment.beta2,
        root_correction=root_correction,
        inverse=inverse,
        rest=1 / root_correction - inverse,
        eps=segment.eps,
        negative_step=-segment.step_size,
    )


# ---- the PyTorch path ------------------------------------------------------------------------------------------------


def _blocks(start: int, stop: int) -> Iterator[slice]:
    for begin in range(start, stop, _BLOCK):
        yield slice(begin, min(begin + _BLOCK, stop))


def _adamw_block(
    weights: Tensor,
    remainder: Tensor | None,
    gradient: Tensor,
    m: Tensor,
    v: Tensor,
    segment: AdamSegment,
    gradient_scale: float,
    part: Part,
) -> None:
    if part == Part.WEIGHTS:
        m, v = m.clone(), v.clone()
    scaled = gradient.float() * gradient_scale
    m.lerp_(scaled, 1 - segment.beta1)
    v.mul_(segment.beta2).addcmul_(scaled, scaled, value=1 - segment.beta2)
    if part == Part.MOMENTS:
        return
    master = weights if remainder is None else _join_block(weights, remainder)
    master.mul_(1 - segment.lr * segment.weight_decay)
    # PyTorch with MKL has an FP32 sqrt that is often 1 ulp off; the double-precision sqrt, rounded, equals the kernels'.
    denominator = v.double().sqrt_().float().div_(segment.root_correction).add_(segment.eps)
    master.addcdiv_(m, denominator, value=-segment.step_size)
    if remainder is not None:
        _split_block(master, weights, remainder)


def _split_block(master: Tensor, weights: Tensor, remainder: Tensor) -> None:
    bits = master.view(torch.int32).masked_fill(master.isnan(), _CANONICAL_NAN)
    high = (bits + 0x8000) >> 16
    weights.view(torch.int16).copy_(high)
    remainder.copy_(bits - (high << 16))


def _join_block(weights: Tensor, remainder: Tensor) -> Tensor:
    return ((weights.view(torch.int16).int() << 16) + remainder).view(torch.float32)
