"""Weights on their way: from stored tensors to tiles, and back to files."""
from __future__ import annotations
