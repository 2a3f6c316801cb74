"""Measures a row of training on uneven rows: `python benchmarks/uneven.py --help`."""
from __future__ import annotations

from megacompile.bench.uneven import main

if __name__ == "__main__":
    main()
