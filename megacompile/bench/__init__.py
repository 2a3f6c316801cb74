"""Benchmarks: rows (`step`, `native`), each measured in a process of its own; tables of rows, as data; how they print."""
from __future__ import annotations
