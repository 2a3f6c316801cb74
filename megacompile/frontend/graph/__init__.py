"""Rewrites a model's graph: adopts attention, rewrites values, cuts it into prologue, layers and epilogue."""
from __future__ import annotations
