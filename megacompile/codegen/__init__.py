"""Compiled code: inductor, and the sealed cache for its output."""
from __future__ import annotations

import importlib.util

from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None  # as with PyTorch for CUDA; `triton_kernels.py` imports it


def on_host(values: Tensor) -> Tensor:
    """A contiguous tensor of a few kilobytes on the CPU, after which the host waits. A copy from the device would wait for
    those of weights and gradients that are queued, often for a whole model's."""
    if not (values.is_cuda and HAS_TRITON):
        return values.cpu()
    from megacompile.codegen import triton_kernels

    return triton_kernels.on_host(values)
