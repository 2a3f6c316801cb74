"""Public names of `megacompile.ir.program`, for passes and plans of one's own."""
from __future__ import annotations

from megacompile.ir.program import *  # noqa: F403
