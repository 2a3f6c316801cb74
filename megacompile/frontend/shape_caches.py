"""What PyTorch keeps of symbolic sizes for the rest of the process, though nobody can ask for it any more."""
from __future__ import annotations

from torch.fx.experimental.symbolic_shapes import ShapeEnv


def forget_symbols() -> None:
    """Empties the caches of `ShapeEnv`'s methods. They have no bound, and their keys hold every `ShapeEnv` there was, with the
    graph that it was made for. What is still in use is computed again when it is asked for."""
    for method in vars(ShapeEnv).values():
        if hasattr(method, "cache_clear"):
            method.cache_clear()
