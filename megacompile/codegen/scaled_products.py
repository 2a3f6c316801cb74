"""Products in float8: padding, scales and kernels, also cuBLASLt's that add to FP32 sums."""
from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacompile.errors import LaneError

# -------------------- Products of float8 matrices with scales: the op `megacompile::scaled_mm`, and its kernels
#
#     float8        the GPU's, with FP32 sums
#     float8_fast   the GPU's, which keeps fewer bits of its sums on Hopper
#     emulated      the same product of the same values in FP32, on any device
_GPU_KERNELS = ("float8", "float8_fast")


def scaled_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, dtype: torch.dtype,
                   kernel: str) -> Tensor:
    """(a * scale_a) @ (b * scale_b) + bias, summed in FP32 and rounded once.

    a [M, K] and b [K, N] in float8, with K next to each other in memory in both; scales float32, [] for a whole matrix, or
    [M, 1] and [1, N]; bias [N] or None. Returns [M, N] in `dtype`; with scales of rows it is rounded to bfloat16 first, which
    is all that kernels give. Raises `ValueError` for an unknown kernel."""
    by_rows = scale_a.dim() > 0
    given = torch.bfloat16 if by_rows else dtype
    if kernel == "emulated":
        product = torch.mm(a.float(), b.float()) * (scale_a * scale_b)
        return (product if bias is None else product + bias).to(given).to(dtype)
    if kernel not in _GPU_KERNELS:
        raise ValueError(f"no such kernel: {kernel}")
    first, second = _operands(a, b)
    how = F.ScalingType.RowWise if by_rows else F.ScalingType.TensorWise
    return F.scaled_mm(first, second.t(), scale_a, how, scale_b, how, bias=bias, output_dtype=given,
                       use_fast_accum=kernel == "float8_fast").to(dtype)


def add_scaled_product(into: Tensor, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, kernel: str) -> None:
    """into += scaled_product(a, b, scale_a, scale_b, None, torch.float32, kernel). `into` is float32 [M, N], contiguous."""
    if kernel in _GPU_KERNELS and not scale_a.dim():
        add_product(into, *_operands(a, b), scale_a, scale_b, fast=kernel == "float8_fast")
    else:
        into.add_(scaled_product(a, b, scale_a, scale_b, None, torch.float32, kernel))


def _operands(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a and the transpose of b, row-major and padded with zeros along K. Kernels read K in units of `ALIGNMENT`, but weight
    gradients are summed over any number of tokens."""
    first, second = a.contiguous(), b.t().contiguous()
    if missing := -a.shape[1] % ALIGNMENT:
        first, second = (F.pad(x.view(torch.uint8), (0, missing)).view(x.dtype) for x in (first, second))
    return first, second


def _scaled_mm_fake(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, dtype: torch.dtype,
                    kernel: str) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)


scaled_mm = torch.library.custom_op("megacompile::scaled_mm", scaled_product, mutates_args=(), schema=(
    "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType dtype, str kernel) -> Tensor"))
scaled_mm.register_fake(_scaled_mm_fake)


# -------------------- Float8 products that add to what is there, by cuBLASLt
#
# PyTorch's products in float8 write a new matrix. A weight gradient is added to a float32 sum, so it would take a temporary of
# the size of the sum, and another kernel that reads both and writes the sum. cuBLASLt adds inside the product.
#
# We call the library that PyTorch has loaded, through ctypes, with the handle of PyTorch's cuBLAS, which serves both libraries.
# As in PyTorch, each product is described anew, and cuBLASLt chooses its algorithm. Names and numbers are those of NVIDIA's
# `cublasLt.h`.
#: The most bytes that a product may use besides its operands: what NVIDIA recommends for Hopper.
WORKSPACE_BYTES = 32 << 20
#: Kernels multiply float8 matrices whose sides are multiples of this.
ALIGNMENT = 16

_FLOAT32, _COMPUTE_FLOAT32, _TRANSPOSED = 0, 68, 1
_TYPES = {torch.float32: _FLOAT32, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
#: cublasLtMatmulDescAttributes_t
_TRANSA, _A_SCALE_POINTER, _B_SCALE_POINTER, _FAST_ACCUM = 3, 17, 18, 25
#: cublasLtMatmulPreferenceAttributes_t; alignments are those of the operands A, B, C and D
_MAX_WORKSPACE_BYTES, _MIN_ALIGNMENT_BYTES = 1, (5, 6, 7, 8)
#: Kernels make no use of a larger alignment.
_BEST_ALIGNMENT = 256

_REMEDY = "use precision='float8:weight_gradients=bfloat16', which does not need it"


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t, which begins with a cublasLtMatmulAlgo_t."""

    _fields_ = [("algorithm", ctypes.c_uint64 * 8), ("workspace_bytes", ctypes.c_size_t), ("status", ctypes.c_int),
                ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4)]


@cache
def _library() -> Any:
    """cuBLASLt. It is in memory already, so the loader finds it by its name."""
    assert torch.version.cuda is not None, "a product on CUDA by a PyTorch without CUDA"
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError as error:
        raise LaneError(f"cuBLASLt cannot be loaded ({error}): {_REMEDY}") from None


def _call(name: str, *arguments: Any) -> None:
    if status := getattr(_library(), name)(*arguments):
        raise LaneError(f"{name} of cuBLASLt failed with status {status}: {_REMEDY}")


class _Handle(ctypes.c_void_p):
    """A description of a product, a layout or a preference. `kind` is a part of its functions' names."""

    kind = ""

    def set(self, attribute: int, value: Any) -> None:
        _call(f"cublasLt{self.kind}SetAttribute", self, ctypes.c_int(attribute), ctypes.byref(value),
              ctypes.c_size_t(ctypes.sizeof(value)))


@contextmanager
def _created(kind: str, *arguments: Any) -> Iterator[_Handle]:
    handle = _Handle()
    handle.kind = kind
    _call(f"cublasLt{kind}Create", ctypes.byref(handle), *arguments)
    try:
        yield handle
    finally:
        _call(f"cublasLt{kind}Destroy", handle)


def _layout(tensor: Tensor) -> Any:
    """Describes a row-major matrix. cuBLASLt's matrices are column-major, so it sees the transpose."""
    rows, columns = tensor.shape
    return _created("MatrixLayout", ctypes.c_int(_TYPES[tensor.dtype]), ctypes.c_uint64(columns), ctypes.c_uint64(rows),
                    ctypes.c_int64(columns))


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _alignment(tensor: Tensor) -> ctypes.c_uint32:
    address = tensor.data_ptr()
    return ctypes.c_uint32(min(address & -address, _BEST_ALIGNMENT))


def add_product(into: Tensor, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, fast: bool) -> None:
    """into += (a * scale_a) @ (b * scale_b).T, summed in FP32 and rounded once.

    into float32 [M, N]; a [M, K] and b [N, K] in float8; all contiguous on one CUDA device, with M, N and K multiples of
    `ALIGNMENT`. Scales float32 []. `fast`: keep fewer bits of the sums on Hopper. Raises `LaneError` if cuBLASLt fails.
    Source: NVIDIA's documentation of `cublasLtMatmul`."""
    (rows, summed), (columns, _) = a.shape, b.shape
    assert into.shape == (rows, columns) and not any(size % ALIGNMENT for size in (rows, columns, summed)), (a.shape, b.shape)
    assert all(tensor.is_contiguous() for tensor in (into, a, b)) and scale_a.dim() == scale_b.dim() == 0
    with torch.cuda.device(into.device), ExitStack() as stack:
        handle, one = ctypes.c_void_p(torch.cuda.current_blas_handle()), ctypes.byref(ctypes.c_float(1.0))
        how = stack.enter_context(_created("MatmulDesc", ctypes.c_int(_COMPUTE_FLOAT32), ctypes.c_int(_FLOAT32)))
        # cuBLASLt sees transposes: into.T += b @ a.T. The kernels want its first operand transposed. So A is b.
        of_a, of_b, of_into = (stack.enter_context(_layout(tensor)) for tensor in (b, a, into))
        how.set(_TRANSA, ctypes.c_int(_TRANSPOSED))
        how.set(_A_SCALE_POINTER, _address(scale_b))
        how.set(_B_SCALE_POINTER, _address(scale_a))
        how.set(_FAST_ACCUM, ctypes.c_int8(fast))
        wanted = stack.enter_context(_created("MatmulPreference"))
        wanted.set(_MAX_WORKSPACE_BYTES, ctypes.c_uint64(WORKSPACE_BYTES))
        for attribute, tensor in zip(_MIN_ALIGNMENT_BYTES, (b, a, into, into), strict=True):
            wanted.set(attribute, _alignment(tensor))
        chosen, count = _Algorithm(), ctypes.c_int()
        _call("cublasLtMatmulAlgoGetHeuristic", handle, how, of_a, of_b, of_into, of_into, wanted, ctypes.c_int(1),
              ctypes.byref(chosen), ctypes.byref(count))
        assert count.value == 1, "cuBLASLt reports success without an algorithm"
        workspace = torch.empty(chosen.workspace_bytes, dtype=torch.uint8, device=into.device)
        _call("cublasLtMatmul", handle, how, one, _address(b), of_a, _address(a), of_b, one, _address(into), of_into,
              _address(into), of_into, ctypes.byref(chosen), _address(workspace), ctypes.c_size_t(chosen.workspace_bytes),
              ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
