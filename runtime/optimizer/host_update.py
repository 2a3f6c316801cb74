"""Updates elements in host memory by an optimizer's rule (`csrc/update.cpp`), in one pass over memory.

The same bits for any number of threads and any instruction set. Where the kernels cannot be built, blocked PyTorch operations
give the same results within 1 ulp.
"""
from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megacompile.runtime.optimizer import native, state_format
from megacompile.runtime.optimizer.rule import Part, Rule, Segment
from megacompile.runtime.optimizer.state_format import BLOCK, FLOAT32, StateFormat, key_of


@dataclass(frozen=True)
class Moments:
    """The moments of a segment. `values`: for each moment, its elements in the format's dtype, [n]. `scales`: of their blocks,
    fp32, if the format has any."""

    format: StateFormat
    values: tuple[Tensor, ...]
    scales: tuple[Tensor, ...] = field(default=())

    def part(self, start: int, stop: int) -> Moments:
        """The moments of elements [start, stop) of the segment. If there are scales, `start` is the first element of a
        block."""
        scales = slice(start // BLOCK, self.format.scales(stop))
        return Moments(self.format, tuple(values[start:stop] for values in self.values), tuple(s[scales] for s in self.scales))


def update(rule: Rule, weights: Tensor, remainder: Tensor | None, gradient: Tensor, segments: Sequence[tuple[Segment, Moments]],
           gradient_scale: float = 1.0, threads: int | None = None, instruction_set: str | None = None,
           part: Part = Part.WHOLE) -> None:
    """Updates weights, remainder and moments of a tile in place, or a `part` of them.

    weights: fp32 [n], or bf16 [n]. remainder: int16 [n], the low bits of bf16 weights' FP32 masters; with None, bf16 weights
    are themselves the masters and are rounded at random. gradient: bf16 or fp32 [n]; it is multiplied in FP32 by
    `gradient_scale`, the clipping coefficient, and not changed. Segments must be ascending and disjoint; elements
    outside all of them keep their values."""
    check_flat("weights", weights, weights.numel(), torch.float32, torch.bfloat16)
    check_flat("gradient", gradient, weights.numel(), torch.float32, torch.bfloat16)
    assert remainder is None or weights.dtype == torch.bfloat16, "only bf16 weights have a remainder"
    if remainder is not None:
        check_flat("remainder", remainder, weights.numel(), torch.int16)
    end = 0
    for segment, moments in segments:
        assert end <= segment.start <= segment.stop <= weights.numel(), f"{segment} starts before {end} or is too long"
        assert segment.step >= 1, f"{segment}: steps count from 1"
        assert not moments.format.scaled or segment.first % BLOCK == 0, f"{segment} divides a block that has one scale"
        assert len(moments.values) == len(rule.moments), f"{rule.name} keeps {len(rule.moments)} moments"
        for values in moments.values:
            check_flat("moment", values, segment.stop - segment.start, moments.format.dtype)
        end = segment.stop
    for each in {moments.format for _, moments in segments}:
        chosen = [(segment, moments) for segment, moments in segments if moments.format == each]
        library = native.update_library(definitions(rule, weights.dtype, remainder is not None, each))
        if library is None:
            for segment, moments in chosen:
                _update_in_pytorch(rule, weights, remainder, gradient, segment, moments, gradient_scale, part)
            continue
        table = (native.NativeSegment * len(chosen))(*(native_segment(rule, *pair) for pair in chosen))
        library.megacompile_update(
            weights.data_ptr(), None if remainder is None else remainder.data_ptr(), gradient.data_ptr(),
            native.BFLOAT16 if gradient.dtype == torch.bfloat16 else native.FLOAT32, ctypes.addressof(table), len(chosen),
            gradient_scale, part, *_execution(threads, instruction_set))


def definitions(rule: Rule, dtype: torch.dtype, exact: bool, moments: StateFormat) -> str:
    """The C++ text before `update.cpp` and `update.cu`. `dtype`: of the weights. `exact`: bf16 weights have a remainder."""
    master = 1 if dtype == torch.float32 else 0 if exact else 2
    return f"#define MASTER {master}\n#define MOMENTS {moments.number}\n{rule.declarations()}"


def native_segment(rule: Rule, segment: Segment, moments: Moments) -> native.NativeSegment:
    """The segment in the form that the kernel reads."""
    made = native.NativeSegment(start=segment.start, stop=segment.stop, first=segment.first,
                                key=key_of(segment.seed, segment.step))
    for index, values in enumerate(moments.values):
        made.moments[index] = values.data_ptr()
        if moments.scales:
            made.scales[index] = moments.scales[index].data_ptr()
    for index, value in enumerate(rule.values(segment.options, segment.step)):
        made.scalars[index] = value
    return made


def _execution(threads: int | None, instruction_set: str | None) -> tuple[int, int]:
    library = native.library()
    assert library is not None, "one library was built, and the other one not"
    return execution(library, threads, instruction_set)


# ---------------------------------------------------------------- the PyTorch path
def _update_in_pytorch(rule: Rule, weights: Tensor, remainder: Tensor | None, gradient: Tensor, segment: Segment,
                       moments: Moments, gradient_scale: float, part: Part) -> None:
    key = key_of(segment.seed, segment.step)
    for block in blocks(segment.start, segment.stop):
        low = None if remainder is None else remainder[block]
        here = slice(block.start - segment.start, block.stop - segment.start)
        random = state_format.random_bits(key, torch.arange(here.start, here.stop) + segment.first)
        values = [_loaded(rule, moments, index, here) for index in range(len(moments.values))]
        master = weights[block].to(torch.float32, copy=True) if low is None else join_block(weights[block], low)
        rule.reference(master, gradient[block].float() * gradient_scale, values, segment.options, segment.step)
        if part != Part.MOMENTS:
            if low is not None:
                split_block(master, weights[block], low)
            elif weights.dtype == torch.bfloat16:
                weights[block] = state_format.rounded_randomly(master, state_format.mixed(random) & 0xFFFF)
            else:
                weights[block] = master
        if part != Part.WEIGHTS:
            for index, value in enumerate(values):
                _store(rule, moments, index, here, value, (random >> 16 if index else random) & 0xFFFF)


def _loaded(rule: Rule, moments: Moments, index: int, here: slice) -> Tensor:
    """A copy of a moment of some elements, fp32."""
    values = moments.values[index][here]
    if not moments.format.scaled:
        return values.float() if moments.format != FLOAT32 else values.clone()
    return state_format.load_codes(values, moments.scales[index][here.start // BLOCK:], rule.moments[index].signed)


def _store(rule: Rule, moments: Moments, index: int, here: slice, value: Tensor, random: Tensor) -> None:
    if moments.format.scaled:
        codes, scales = state_format.store_codes(value, random, rule.moments[index].signed)
        first = here.start // BLOCK
        moments.scales[index][first:first + len(scales)] = scales
        moments.values[index][here] = codes
    elif moments.format == FLOAT32:
        moments.values[index][here] = value
    else:
        moments.values[index][here] = state_format.rounded_randomly(value, random)


# --------------------
# Arithmetic on flat host tensors: gradient norm, accumulation, FP32 master split and join, copy (updates: `host_update.py`).
#
# The kernels are in `csrc/host.cpp`: one pass over memory, and the same bits for any number of threads and any instruction
# set. Where they cannot be built, blocked PyTorch operations give the same results within 1 ulp.
#
# Tensors are one-dimensional, contiguous and on the CPU. The master of a bf16 weight is an exact FP32 value whose bits
# are (weight << 16) + remainder; the weight is the master rounded to nearest, ties away from zero. A NaN is stored as
# the canonical NaN, with remainder 0.
#
# `threads` defaults to `native.default_threads()`, `instruction_set` to the best one (tests force others). The PyTorch path
# ignores both.
_DTYPES = {torch.float32: native.FLOAT32, torch.bfloat16: native.BFLOAT16}
_CANONICAL_NAN = 0x7FC00000
_BLOCK = 1 << 20  # elements that the PyTorch path processes at a time; bounds its temporary memory
_NORM_BLOCK = 16384  # kChunk of execution.h. PyTorch sums so few elements in one thread, so in a fixed order


def squared_norm(gradient: Tensor, threads: int | None = None, instruction_set: str | None = None) -> float:
    """Sum of the squares of a bf16 or fp32 [n] tensor, in double precision. NaN and inf propagate.

    The order of the sum depends only on n, so threads and instruction set do not change a bit.
    """
    check_flat("gradient", gradient, gradient.numel(), torch.float32, torch.bfloat16)
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
            *execution(library, threads, instruction_set),
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
    check_flat("destination", destination, destination.numel(), torch.float32, torch.bfloat16)
    check_flat("source", source, destination.numel(), torch.float32, torch.bfloat16)
    if overwrite and destination.dtype == source.dtype:
        copy(destination, source, threads)
        return
    library = native.library()
    if library is None:
        for block in blocks(0, destination.numel()):
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
        *execution(library, threads, instruction_set),
    )


def split_fp32(
    master: Tensor, threads: int | None = None, instruction_set: str | None = None
) -> tuple[Tensor, Tensor]:
    """(weights bf16 [n], remainder int16 [n]) of an fp32 [n] master. Exact except for the payloads of NaNs."""
    check_flat("master", master, master.numel(), torch.float32)
    weights = torch.empty(master.numel(), dtype=torch.bfloat16)
    remainder = torch.empty(master.numel(), dtype=torch.int16)
    library = native.library()
    if library is None:
        for block in blocks(0, master.numel()):
            split_block(master[block], weights[block], remainder[block])
    else:
        library.megacompile_split(
            master.data_ptr(),
            weights.data_ptr(),
            remainder.data_ptr(),
            master.numel(),
            *execution(library, threads, instruction_set),
        )
    return weights, remainder


def join_fp32(
    weights: Tensor, remainder: Tensor, threads: int | None = None, instruction_set: str | None = None
) -> Tensor:
    """The fp32 [n] master of bf16 [n] weights and their int16 [n] remainder. Exact."""
    check_flat("weights", weights, weights.numel(), torch.bfloat16)
    check_flat("remainder", remainder, weights.numel(), torch.int16)
    master = torch.empty(weights.numel(), dtype=torch.float32)
    library = native.library()
    if library is None:
        for block in blocks(0, weights.numel()):
            master[block] = join_block(weights[block], remainder[block])
    else:
        library.megacompile_join(
            weights.data_ptr(),
            remainder.data_ptr(),
            master.data_ptr(),
            weights.numel(),
            *execution(library, threads, instruction_set),
        )
    return master


def copy(destination: Tensor, source: Tensor, threads: int | None = None) -> None:
    """Copies bits between two [n] tensors of one dtype, any dtype, that do not overlap."""
    check_flat("destination", destination, source.numel(), source.dtype)
    check_flat("source", source, source.numel(), source.dtype)
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


def check_flat(name: str, tensor: Tensor, elements: int, *dtypes: torch.dtype) -> None:
    assert tensor.device.type == "cpu" and tensor.dim() == 1 and tensor.is_contiguous(), (
        f"{name} is {tuple(tensor.shape)} on {tensor.device}: the kernels take flat contiguous host memory"
    )
    assert tensor.dtype in dtypes, f"{name} is {tensor.dtype}, not one of {dtypes}"
    assert tensor.numel() == elements, f"{name} has {tensor.numel()} elements, not {elements}"


def execution(library: ctypes.CDLL, threads: int | None, instruction_set: str | None) -> tuple[int, int]:
    """The last two arguments of every kernel: the instruction set's number and the number of threads."""
    available = native.instruction_sets(library)
    chosen = available[-1] if instruction_set is None else instruction_set
    assert chosen in available, f"this processor runs {available}, not {chosen}"
    return native.INSTRUCTION_SETS.index(chosen), native.default_threads() if threads is None else threads


# ---- the PyTorch path ------------------------------------------------------------------------------------------------


def blocks(start: int, stop: int) -> Iterator[slice]:
    """Slices of at most a million elements."""
    for begin in range(start, stop, _BLOCK):
        yield slice(begin, min(begin + _BLOCK, stop))


def split_block(master: Tensor, weights: Tensor, remainder: Tensor) -> None:
    bits = master.view(torch.int32).masked_fill(master.isnan(), _CANONICAL_NAN)
    high = (bits + 0x8000) >> 16
    weights.view(torch.int16).copy_(high)
    remainder.copy_(bits - (high << 16))


def join_block(weights: Tensor, remainder: Tensor) -> Tensor:
    return ((weights.view(torch.int16).int() << 16) + remainder).view(torch.float32)
