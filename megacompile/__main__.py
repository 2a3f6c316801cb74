"""`python -m megacompile` runs the command `megacompile`."""
from __future__ import annotations

from megacompile.cli import app

app(prog_name="megacompile")
