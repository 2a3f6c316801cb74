"""Measures a row of native PyTorch: `python benchmarks/native.py --help`."""
from __future__ import annotations

from megacompile.bench.native import main

if __name__ == "__main__":
    main()
