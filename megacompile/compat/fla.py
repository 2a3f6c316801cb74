"""flash-linear-attention: its functions that we call, and the context that they run in.

With Triton 3.4 to 3.7.0 on Hopper GPUs, one kernel of its backwards gives wrong results, and it raises RuntimeError instead
(its issue 640). There, a kernel of ours replaces it.

Its kernels are tuned when they first run: about 94 variants, which Triton compiles one after another and measures for
0.1 s each. In the context, a third is left out, and the others are compiled side by side and measured with a few runs.
"""
from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from megacompile.compat.hugging_face import replaced

#: Timed runs of each variant of a kernel.
_RUNS = 5
#: Variants with more are not tried: on an H200 none was more than 2% faster than the best of the others.
_WARPS, _STAGES = 8, 3
#: The versions that were tested. Others are not used.
VERSIONS = "0.6."


@functools.cache
def is_usable() -> bool:
    """True if the library is installed, in a version that was tested (the extra `hybrid`)."""
    try:
        return importlib.metadata.version("fla-core").startswith(VERSIONS)
    except importlib.metadata.PackageNotFoundError:
        return False


@functools.cache
def functions() -> dict[str, Callable[..., Any]]:
    """The functions by name: `recurrence`, `delta_rule`, `delta_rule_of_channels` and `conv`."""
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda
    from fla.ops.simple_gla import chunk_simple_gla

    return {"recurrence": chunk_simple_gla, "delta_rule": chunk_gated_delta_rule, "delta_rule_of_channels": chunk_kda,
            "conv": causal_conv1d}


#: Held while a function runs: a tuner keeps the arguments of its call, and what the context replaces is there for all threads.
_lock = threading.RLock()


@contextlib.contextmanager
def running() -> Iterator[None]:
    """A context for the functions and their backwards, for one thread at a time. The backwards run on any GPU, and kernels are
    tuned in seconds."""
    from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1

    with _lock, contextlib.ExitStack() as patches:
        if IS_NVIDIA_HOPPER and TRITON_ABOVE_3_4_0 and not TRITON_ABOVE_3_7_1:
            from megacompile.compat.fla_gradients import chunk_gradients

            for name in ("fla.ops.gated_delta_rule.chunk", "fla.ops.simple_gla.chunk"):
                patches.enter_context(replaced(importlib.import_module(name), chunk_bwd_dqkwg=chunk_gradients))
        autotuner, changes = _tuning()
        patches.enter_context(replaced(autotuner, **changes))
        yield


@functools.cache
def _tuning() -> tuple[type, dict[str, Any]]:
    """Triton's autotuner, and methods for it that compile the variants of a kernel side by side and time each briefly."""
    from triton import AsyncCompileMode
    from triton.runtime.autotuner import Autotuner

    measure, prune = Autotuner._bench, Autotuner.prune_configs

    def prune_configs(self: Any, options: Any) -> list[Any]:
        variants: list[Any] = prune(self, options)
        return [each for each in variants if each.num_warps <= _WARPS and each.num_stages <= _STAGES] or variants

    def _bench(self: Any, *args: Any, config: Any, **options: Any) -> Any:
        variants = self.prune_configs(options)
        if config is variants[0]:
            with ThreadPoolExecutor(os.cpu_count()) as threads, AsyncCompileMode(threads, ignore_errors=True):
                for variant in variants:
                    self.fn.run(*args, **{**options, **variant.all_kwargs(), "warmup": True})
        return measure(self, *args, config=config, **options)

    return Autotuner, {"_bench": _bench, "prune_configs": prune_configs, "do_bench": property(lambda self: _milliseconds)}


def _milliseconds(call: Callable[[], object], quantiles: Sequence[float]) -> list[float]:
    """The quantiles of the times of `_RUNS` calls on the current CUDA stream, in milliseconds."""
    call()
    times = []
    for _ in range(_RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return torch.tensor(times).quantile(torch.tensor(quantiles)).tolist()
