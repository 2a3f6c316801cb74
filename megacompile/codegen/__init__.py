"""Compiled code: inductor, and the sealed cache for its output."""
from __future__ import annotations
