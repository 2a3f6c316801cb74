"""Updates elements in host memory by an optimizer's rule (`csrc/update.cpp`), in one pass over memory.

The same bits for any number of threads and any instruction set. Where the kernels cannot be built, blocked PyTorch operations
give the same results within 1 ulp.
"""
from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megacompile.runtime.optimizer import native, state_format
from megacompile.runtime.optimizer.host_kernels import blocks, check_flat, execution, join_block, split_block
from megacompile.runtime.optimizer.rule import Part, Rule, Segment
from megacompile.runtime.optimizer.state_format import BLOCK, FLOAT32, StateFormat, key_of


@dataclass(frozen=True)
class Moments:
    """Where the moments of a segment are. `values`: for each moment, those of its elements, in the format's dtype, [n];
    `scales`: those of its blocks, fp32, if the format has any."""

    format: StateFormat
    values: tuple[Tensor, ...]
    scales: tuple[Tensor, ...] = field(default=())

    def part(self, start: int, stop: int) -> Moments:
        """The moments of elements [start, stop) of the segment. Where there are scales, `start` is the first element of a
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
    """What comes before `update.cpp` and `update.cu`. `dtype`: of the weights. `exact`: bf16 weights have a remainder."""
    master = 1 if dtype == torch.float32 else 0 if exact else 2
    return f"#define MASTER {master}\n#define MOMENTS {moments.number}\n{rule.declarations()}"


def native_segment(rule: Rule, segment: Segment, moments: Moments) -> native.NativeSegment:
    """What the kernel reads of a segment."""
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
