"""Public name of `megacompile.ir.text`: reads a program's text."""
from __future__ import annotations

from megacompile.ir.text import parse

__all__ = ["parse"]
