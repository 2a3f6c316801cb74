"""Files, memory, threads and terminals of the machine that Python runs on."""
from __future__ import annotations
