"""Tensors that users read and write: gradients in tiles, writes from outside, and the model that a parameter belongs to."""
from __future__ import annotations
