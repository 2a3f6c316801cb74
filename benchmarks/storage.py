"""Measures a row of loading and saving: `python benchmarks/storage.py --help`."""
from __future__ import annotations

from megacompile.bench.storage import main

if __name__ == "__main__":
    main()
