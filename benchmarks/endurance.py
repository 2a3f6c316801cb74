"""Measures an endurance row: `python benchmarks/endurance.py --help`."""
from __future__ import annotations

from megacompile.bench.endurance import main

if __name__ == "__main__":
    main()
