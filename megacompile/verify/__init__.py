"""Proofs over programs: what must hold of every section, after every pass."""
from __future__ import annotations
