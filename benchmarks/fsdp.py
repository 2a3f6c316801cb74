"""Measures a row of PyTorch's FSDP2, offloaded to the host: `python benchmarks/fsdp.py --help`."""
from __future__ import annotations

from megacompile.bench.fsdp import main

if __name__ == "__main__":
    main()
