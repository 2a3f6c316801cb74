"""Benchmarks: modules that measure rows (such as `step` and `native`) in separate processes, tables of rows, and printing."""
from __future__ import annotations
