"""flash-linear-attention: its functions that we call, and the context that they run in.

With Triton 3.4 to 3.7.0 on Hopper GPUs, one kernel of its backwards gives wrong results, and it raises RuntimeError instead
(its issue 640). There, products of PyTorch replace the kernel.

Its kernels are tuned when they first run: about a hundred variants, which Triton compiles one after another and measures for
0.1 s each. In the context, they are compiled side by side and measured with a few runs.
"""
from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from megacompile.compat.hugging_face import replaced

#: Timed runs of each variant of a kernel.
_RUNS = 5
#: Tokens whose gradients the repair computes at once, which bounds the memory of products in float32.
_TOKENS = 8192
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


@contextlib.contextmanager
def running() -> Iterator[None]:
    """A context for the functions and their backwards. The backwards run on any GPU, and kernels are tuned in seconds."""
    from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1

    with contextlib.ExitStack() as patches:
        if IS_NVIDIA_HOPPER and TRITON_ABOVE_3_4_0 and not TRITON_ABOVE_3_7_1:
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

    measure = Autotuner._bench

    def _bench(self: Any, *args: Any, config: Any, **options: Any) -> Any:
        variants = self.prune_configs(options)
        if config is variants[0]:
            with ThreadPoolExecutor(os.cpu_count()) as threads, AsyncCompileMode(threads, ignore_errors=True):
                for variant in variants:
                    self.fn.run(*args, **{**options, **variant.all_kwargs(), "warmup": True})
        return measure(self, *args, config=config, **options)

    return Autotuner, {"_bench": _bench, "do_bench": property(lambda self: _milliseconds)}


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


def chunk_gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, h: Tensor, dh: Tensor, w: Tensor | None = None, g: Tensor | None = None,
    g_gamma: Tensor | None = None, dv: Tensor | None = None, scale: float = 1.0, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, chunk_size: int = 64, chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """What `fla.ops.common.chunk_o.chunk_bwd_dqkwg` returns: the gradients of queries, keys, of the keys that a delta rule
    corrects, and of `g`, the sums of logarithms (of base 2) of decays within each chunk.

    q, k [B, T, H, K]; v, do, dv [B, T, Hv, V]; h, dh [B, chunks, Hv, K, V], the states before chunks and the gradients of those
    after them; g float32 [B, T, Hv]."""
    assert g is not None and g_gamma is None and not state_v_first
    batch, length, groups, width = k.shape
    heads = v.shape[2]
    rows, inside = _rows_of_chunks(batch, length, chunk_size, cu_seqlens, chunk_indices, k.device)
    h, dh = h.flatten(0, 1), dh.flatten(0, 1)
    of_q, of_k = (x.new_empty(batch * length, heads, width) for x in (q, k))
    of_w = None if w is None else w.new_empty(batch * length, heads, width)
    of_g = g.new_empty(batch * length, heads)
    step = max(1, _TOKENS // chunk_size)
    for at in range(0, len(rows), step):
        where, there = rows[at:at + step], inside[at:at + step]
        states, of_states = (x[at:at + step].to(k.dtype) for x in (h, dh))

        def take(x: Tensor, where: Tensor = where, there: Tensor = there) -> Tensor:
            """[chunks, Hv, size, ...], with zeros for tokens that do not exist."""
            found = x.flatten(0, 1)[where] * there[(...,) + (None,) * (x.dim() - 2)]
            return found.repeat_interleave(heads // found.shape[2], 2).transpose(1, 2)

        queries, keys, values, of_out = take(q), take(k), take(v), take(do)
        total = take(g)
        ends = (there.sum(1) - 1)[:, None, None].expand(-1, heads, 1)
        last = total.gather(2, ends)
        seen = (there[:, :, None] & there[:, None]).tril()[:, None]
        between = (total[..., None] - total[..., None, :]).masked_fill(~seen, float("-inf")).exp2()
        pairs = (_product(of_out, values.transpose(2, 3)) * between * scale).to(k.dtype)
        rest = torch.exp2(last - total) * there[:, None]
        from_states = _product(values, of_states.transpose(2, 3)) * rest[..., None]
        grad_q = (_product(of_out, states.transpose(2, 3)) * (torch.exp2(total) * scale)[..., None]
                  + _product(pairs, keys))
        grad_k = from_states + _product(pairs.transpose(2, 3), queries)
        of_last = ((h[at:at + step].float() * dh[at:at + step].float()).sum((2, 3)) * torch.exp2(last[..., 0])
                   + (from_states * keys).sum((2, 3)))
        grad_g = (grad_q * queries).sum(3) - (grad_k * keys).sum(3)
        grad_g.scatter_add_(2, ends, of_last[..., None])
        put = where[there]
        for into, made in ((of_q, grad_q), (of_k, grad_k), (of_g, grad_g)):
            into[put] = made.transpose(1, 2)[there].to(into.dtype)
        if of_w is not None and dv is not None:
            of_w[put] = -_product(take(dv), states.transpose(2, 3)).transpose(1, 2)[there].to(of_w.dtype)

    def summed(x: Tensor) -> Tensor:
        found = x.view(batch, length, heads, width)
        return found if heads == groups else found.view(batch, length, groups, -1, width).sum(3)

    return (summed(of_q), summed(of_k), None if of_w is None else of_w.view(batch, length, heads, width),
            of_g.view(batch, length, heads))


def _rows_of_chunks(
    batch: int, length: int, size: int, bounds: Tensor | None, chunks: Tensor | None, device: torch.device,
) -> tuple[Tensor, Tensor]:
    """The numbers of each chunk's tokens among all B x T, int64 [chunks, size], and whether they exist. `bounds`: of the
    sequences; `chunks`: the sequence and the place there of each chunk. Without them each row is a sequence."""
    within = torch.arange(size, device=device)
    if bounds is not None:
        assert chunks is not None, "chunks of sequences have indices"
        sequence, place = chunks.long().unbind(1)
        begin, end = bounds.long()[sequence] + place * size, bounds.long()[sequence + 1]
    else:
        count = -(-length // size)
        chunk = torch.arange(batch * count, device=device)
        row, place = chunk // count, chunk % count
        begin, end = row * length + place * size, (row + 1) * length
    rows = begin[:, None] + within
    inside = rows < end[:, None]
    return torch.where(inside, rows, begin[:, None]), inside


def _product(a: Tensor, b: Tensor) -> Tensor:
    """A product of batches of matrices with sums and a result in float32."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32).unflatten(0, a.shape[:2])
    return a.float() @ b.float()
