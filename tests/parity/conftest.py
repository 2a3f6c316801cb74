"""Lets the parity tests import the modules that stand beside them (tests are not a package, see `--import-mode`)."""
from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
