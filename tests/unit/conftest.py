"""Lets unit tests import the tiny models of the parity tests (tests are no package, see `--import-mode`)."""
from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "parity"))
