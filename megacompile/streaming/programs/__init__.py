"""The programs of a streamed model: captures, compiled shapes, kernels, and programs edited by hand."""
from __future__ import annotations
