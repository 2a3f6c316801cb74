"""`adam.adamw` on a CUDA device, to the bit: the same source of an element's update (`csrc/adamw.h`), compiled at run time."""
from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from .adam import AdamSegment, native_segment

_SOURCE = Path(__file__).parent / "csrc"
_PRELUDE = """
typedef unsigned short uint16_t; typedef short int16_t; typedef unsigned int uint32_t; typedef int int32_t;
typedef long long int64_t;
#define INLINE __device__ __forceinline__
#define BITS __float_as_uint
#define FLOAT __uint_as_float
#define FMA __fmaf_rn
#define SQRT __fsqrt_rn
"""
# Like the host's: no contraction, nothing flushed to zero, division and root rounded correctly.
_OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
_THREADS, _BLOCKS = 256, 4096  # a few waves of blocks on the largest devices; each thread loops


@functools.cache
def _kernels(cupy: Any) -> dict[torch.dtype, Any]:
    code = _PRELUDE + "".join((_SOURCE / name).read_text(encoding="utf-8") for name in ("adamw.h", "adam.cu"))
    module = cupy.RawModule(code=code.replace("#pragma once\n", ""), options=_OPTIONS)
    return {torch.bfloat16: module.get_function("adamw_bfloat16"), torch.float32: module.get_function("adamw_float32")}


def adamw(cupy: Any, stream: Any, weights: Tensor, remainder: Tensor | None, gradient: Tensor, m: Tensor, v: Tensor,
          segments: Sequence[AdamSegment], gradient_scale: float) -> None:
    """Issues the update to a CuPy stream. Tensors are as for `adam.adamw`, on the current device, gradients in the dtype of
    the weights."""
    assert weights.dtype == gradient.dtype, f"gradients are {gradient.dtype}, weights {weights.dtype}"
    assert (remainder is not None) == (weights.dtype == torch.bfloat16), "bf16 weights, and only they, have a remainder"
    kernel = _kernels(cupy)[weights.dtype]
    pointers = [numpy.uint64(0 if t is None else t.data_ptr()) for t in (weights, remainder, gradient, m, v)]
    for segment in segments:
        fields = native_segment(segment)
        bounds = numpy.int64(fields.start), numpy.int64(fields.stop)
        scalars = (numpy.float32(getattr(fields, name)) for name, _ in fields._fields_[2:])
        blocks = max(1, min(_BLOCKS, -(-(segment.stop - segment.start) // (4 * _THREADS))))
        kernel((blocks,), (_THREADS,), (*pointers, numpy.float32(gradient_scale), *bounds, *scalars), stream=stream)
