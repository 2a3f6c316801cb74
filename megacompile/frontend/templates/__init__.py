"""Templates: one joint graph for all calls of a kind, and the variants that are cut from it."""
from __future__ import annotations
