"""Measures a row of GRPO by phase: `python benchmarks/grpo.py --help`."""
from __future__ import annotations

from megacompile.bench.grpo import main

if __name__ == "__main__":
    main()
