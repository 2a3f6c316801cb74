"""Prints rows as Markdown: `python benchmarks/table.py --help`."""
from __future__ import annotations

from pathlib import Path

from megacompile.bench.table import main

if __name__ == "__main__":
    main(Path(__file__).parent / "results/step.jsonl")
