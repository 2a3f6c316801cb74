"""Tests that need a CUDA device and CuPy; elsewhere they skip themselves."""
from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "unit")]  # modules beside the tests can be imported, and those of unit tests
