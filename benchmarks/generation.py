"""Measures a row of generation: `python benchmarks/generation.py --help`."""
from __future__ import annotations

from megacompile.bench.generation import main

if __name__ == "__main__":
    main()
