"""Compiled code: inductor, and the sealed cache that it is kept in."""
from __future__ import annotations
