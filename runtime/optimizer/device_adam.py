"""`adam.adamw` on a CUDA device with the same bits: the update of an element (`csrc/adamw.h`), compiled at run time."""
from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from megacompile.runtime.optimizer.adam import AdamSegment, native_segment

_SOURCE = Path(__file__).parent / "csrc"
_PRELUDE = """
typedef unsigned short uint16_t; typedef short int16_t; typedef unsigned int uint32_t; typedef int int32_t;
typedef long long int64_t;
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


@functools.cache
def _kernels(cupy: Any) -> dict[torch.dtype, Any]:
    code = _PRELUDE + "".join((_SOURCE / name).read_text(encoding="utf-8") for name in ("adamw.h", "adam.cu"))
    module = cupy.RawModule(code=code.replace("#pragma once\n", ""), options=("--std=c++17",))
    return {torch.bfloat16: module.get_function("adamw_bfloat16"), torch.float32: module.get_function("adamw_float32")}


def adamw(cupy: Any, stream: Any, weights: Tensor, remainder: Tensor | None, gradient: Tensor, m: Tensor, v: Tensor,
          segments: Sequence[AdamSegment], gradient_scale: float, judged: tuple[Tensor, Tensor] | None = None) -> None:
    """Issues the update to a CuPy stream. Tensors are as for `adam.adamw`, on the current device, with gradients in the dtype
    of the weights. `judged`: the gradients' norms, fp32 [n], and a flag, int32 [1]. If a norm is not finite, nothing is changed
    and the flag becomes 1."""
    assert weights.dtype == gradient.dtype, f"gradients are {gradient.dtype}, weights {weights.dtype}"
    assert (remainder is not None) == (weights.dtype == torch.bfloat16), "bf16 weights, and only they, have a remainder"
    kernel = _kernels(cupy)[weights.dtype]
    pointers = [numpy.uint64(0 if t is None else t.data_ptr()) for t in (weights, remainder, gradient, m, v)]
    norms, verdict = judged if judged is not None else (None, None)
    judging = (numpy.uint64(0 if norms is None else norms.data_ptr()), numpy.int64(0 if norms is None else norms.numel()),
               numpy.uint64(0 if verdict is None else verdict.data_ptr()))
    for segment in segments:
        fields = native_segment(segment)
        bounds = numpy.int64(fields.start), numpy.int64(fields.stop)
        scalars = (numpy.float32(getattr(fields, name)) for name, _ in fields._fields_[2:])
        blocks = max(1, min(_BLOCKS, -(-(segment.stop - segment.start) // (4 * _THREADS))))
        kernel((blocks,), (_THREADS,), (*pointers, numpy.float32(gradient_scale), *judging, *bounds, *scalars), stream=stream)
