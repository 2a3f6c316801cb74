"""The programs of a streamed model: captures, executables, kernels, and programs edited by hand."""
from __future__ import annotations
