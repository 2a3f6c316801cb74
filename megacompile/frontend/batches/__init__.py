"""Batch arguments besides tokens: masks of pairs, images, and where features go."""
from __future__ import annotations
