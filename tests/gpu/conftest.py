"""Tests that need a CUDA device and CuPy; elsewhere they skip themselves."""
from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # modules beside the tests can be imported
