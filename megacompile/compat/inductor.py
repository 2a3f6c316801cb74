"""Private parts of inductor, which compiles graphs."""
from __future__ import annotations

from torch._inductor import (
    compile,  # a graph -> compiled code
    config,  # whether its caches are on
    inductor_prims,  # fixes the layout of an operand
)
from torch._inductor.runtime.runtime_utils import triton_cache_dir  # where inductor keeps Triton's kernels for a device

__all__ = ["compile", "config", "inductor_prims", "triton_cache_dir", "wake_compilers"]


def wake_compilers() -> None:
    """Starts the processes that compile Triton's kernels, which takes seconds. Until they run, inductor compiles the kernels in
    this process, in turn."""
    from torch._inductor.async_compile import AsyncCompile  # importing it starts processes

    AsyncCompile.wakeup()
