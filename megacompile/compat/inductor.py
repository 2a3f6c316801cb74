"""Private parts of inductor, which compiles graphs."""
from __future__ import annotations

from torch._inductor import (
    compile,  # a graph -> compiled code
    config,  # whether its caches are on
    inductor_prims,  # fixes the layout of an operand
)

__all__ = ["compile", "config", "inductor_prims"]
