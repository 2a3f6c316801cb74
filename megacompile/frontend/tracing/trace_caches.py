"""Removes what PyTorch keeps of a trace for the rest of the process, though nothing can use it any more."""
from __future__ import annotations

import gc
import linecache
from types import FunctionType

from megacompile.compat.core import generated_code
from megacompile.compat.symbols import ShapeEnv


def forget_symbols() -> None:
    """Empties the caches of `ShapeEnv`'s methods. They are unbounded, and their keys hold every `ShapeEnv` ever made, with its
    graph. Values still in use are computed again on demand."""
    for method in vars(ShapeEnv).values():
        if hasattr(method, "cache_clear"):
            method.cache_clear()


def release_tracked_fakes(environment: ShapeEnv) -> None:
    """Lets a `ShapeEnv` be collected. Its list of traced inputs holds fake tensors, whose sizes hold the `ShapeEnv` through
    C++, so the garbage collector does not see the cycle. Only Dynamo's guards read the list, at the end of a trace."""
    environment.tracked_fakes = None


def forget_generated_code() -> None:
    """Drops the source lines of every graph module that no longer exists. torch.fx keeps one text for each `recompile()`, to
    show it in stack traces, and never drops one."""
    alive = {function.__code__.co_filename for function in gc.get_objects() if type(function) is FunctionType}
    kept = generated_code()
    for name in [name for name in kept if name not in alive]:
        kept.pop(name, None)
        linecache.cache.pop(name, None)
