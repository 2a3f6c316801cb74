"""Convolutions are traced for any batch size.

On a CPU, PyTorch chooses between kernels of a convolution by comparing the batch size with 16, also while it traces. The trace
would then hold on one side of that number alone, although all of these kernels compute the same.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.backends import mkldnn, nnpack


@contextlib.contextmanager
def convolutions_of_any_batch() -> Iterator[None]:
    """A context in which no convolution on a CPU has a choice of kernels."""
    of_mkldnn, *_ = mkldnn.set_flags(False, _fp32_precision=None)  # None: leave it as it is
    (of_nnpack,) = nnpack.set_flags(False)
    try:
        yield
    finally:
        mkldnn.set_flags(of_mkldnn, _fp32_precision=None)
        nnpack.set_flags(of_nnpack)
