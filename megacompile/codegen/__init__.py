"""Compiled code: inductor, and the sealed cache for its output."""
from __future__ import annotations

import importlib.util

HAS_TRITON = importlib.util.find_spec("triton") is not None  # as with PyTorch for CUDA; `triton_kernels.py` imports it
