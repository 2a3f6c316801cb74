"""Public names of `megacompile.ir.plan`, for passes and plans of one's own."""
from __future__ import annotations

from megacompile.ir.plan import *  # noqa: F403
from megacompile.ir.plan import BatchSpec as Shape  # noqa: F401  (its earlier name)
