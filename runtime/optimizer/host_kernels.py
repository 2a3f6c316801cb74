"""Arithmetic on flat host tensors: gradient norm, accumulation, FP32 master split and join, copy (updates: `host_update.py`).

The kernels are in `csrc/host.cpp`: one pass over memory, and the same bits for any number of threads and any instruction
set. Where they cannot be built, blocked PyTorch operations give the same results within 1 ulp.

Tensors are one-dimensional, contiguous and on the CPU. The master of a bf16 weight is an exact FP32 value whose bits
are (weight << 16) + remainder; the weight is the master rounded to nearest, ties away from zero. A NaN is stored as
the canonical NaN, with remainder 0.

`threads` defaults to `native.default_threads()`, `instruction_set` to the best one (tests force others). The PyTorch path
ignores both.
"""
from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megacompile.runtime.optimizer import native

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
