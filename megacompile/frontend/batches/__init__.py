"""Batch arguments beside tokens: masks of pairs, images, places of features."""
from __future__ import annotations
