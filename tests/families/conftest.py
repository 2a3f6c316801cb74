"""Lets these tests import the modules that stand beside them, and the script that writes the page."""
from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2] / "docs")]
