"""Measures a row of megacompile: `python benchmarks/step.py --help`."""
from __future__ import annotations

from megacompile.bench.step import main

if __name__ == "__main__":
    main()
