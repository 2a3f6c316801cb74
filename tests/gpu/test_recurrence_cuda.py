"""Kernels of flash-linear-attention for recurrences and short convolutions, against a loop over tokens in float32."""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from test_recurrence import KINDS, SEGMENTS, arguments, assert_near
from torch import Tensor

from megacompile.compat import fla

pytest.importorskip("fla")

pytestmark = pytest.mark.gpu


def assert_as_near(found: list[Tensor], exact: list[Tensor], rounded: list[Tensor]) -> None:
    """`found` is at most twice as far from `exact` as the reference on rounded arguments."""
    for ours, right, reference in zip(found, exact, rounded, strict=True):
        error, usual = ((x.float() - right.float()).norm() / right.float().norm() for x in (ours, reference))
        assert error <= max(2 * float(usual), 1.5e-2)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "channels"])
def test_fla_computes_a_recurrence_as_the_reference(kind: str, packed: bool) -> None:
    segments = SEGMENTS.cuda() if packed else None
    tensors = [x.cuda() for x in arguments(kind, 2, SEGMENTS.shape[1])]
    low = [x if i == 3 else x.bfloat16() for i, x in enumerate(tensors)]

    def call(kernel: str) -> Callable[..., Tensor]:
        return lambda *x: torch.ops.megacompile.recurrence(*x[:4], x[4] if len(x) > 4 else None, 0.3, kernel, segments)

    exact = results(call("reference"), [x.float() for x in low])
    assert_as_near(results(call("fla"), low), exact, results(call("reference"), low))


@pytest.mark.parametrize("packed", [False, True])
def test_fla_computes_a_short_convolution_as_the_reference(packed: bool) -> None:
    segments = SEGMENTS.cuda() if packed else None
    tensors = [torch.randn(2, SEGMENTS.shape[1], 32).cuda(), torch.randn(32, 4).cuda(), torch.randn(32).cuda()]
    low = [x.bfloat16() for x in tensors]

    def call(kernel: str) -> Callable[..., Tensor]:
        return lambda *x: torch.ops.megacompile.causal_conv(*x, "silu", kernel, segments)

    exact = results(call("reference"), [x.float() for x in low])
    assert_as_near(results(call("fla"), low), exact, results(call("reference"), low))


def results(call: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """The result of a call and the gradients of its arguments, on the device."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = call(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).reshape(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights)]


@pytest.mark.parametrize("bounds", [None, [0, 30, 31, 95, 150]], ids=["rows", "sequences"])
def test_the_repair_of_a_kernel_differentiates_each_chunk(bounds: list[int] | None) -> None:
    """`chunk_gradients` beside autograd, for a chunk's results and the state after it."""
    from megacompile.compat.fla_gradients import chunk_gradients

    torch.manual_seed(0)
    rows, length, size = (2, 130, 64) if bounds is None else (1, 150, 64)
    ends = [*range(0, length, size), length] if bounds is None else bounds
    chunks = [(row, slice(*each)) for row in range(rows) for each in itertools.pairwise(ends)]
    indices = None if bounds is None else torch.tensor([[0, 0], [1, 0], [2, 0], [3, 0]])
    q, k = (torch.randn(rows, length, 2, 16, requires_grad=True) for _ in range(2))
    v, do, dv = (torch.randn(rows, length, 4, 8) for _ in range(3))
    w, g = torch.randn(rows, length, 4, 16), -torch.rand(rows, length, 4)
    totals = torch.cat([g[row:row + 1, where].cumsum(1) for row, where in chunks], 1).reshape(g.shape).requires_grad_()
    count = len(chunks) // rows
    h, dh = (torch.randn(rows, count, 4, 16, 8) for _ in range(2))
    loss, of_w = torch.zeros(()), torch.empty_like(w)
    for number, (row, where) in enumerate(chunks):
        queries, keys = (x[row, where].repeat_interleave(2, 1).transpose(0, 1) for x in (q, k))
        values, total = v[row, where].transpose(0, 1), totals[row, where].T
        state, grad_state = h[row, number % count], dh[row, number % count]
        pairs = (queries @ keys.transpose(1, 2)) * torch.exp2(total[..., None] - total[:, None]).tril()
        out = 0.3 * ((queries * torch.exp2(total)[..., None]) @ state + pairs @ values)
        rest = torch.exp2(total[:, -1:] - total)[..., None]
        after = state * torch.exp2(total[:, -1:, None]) + (keys * rest).transpose(1, 2) @ values
        loss = loss + (out * do[row, where].transpose(0, 1)).sum() + (after * grad_state).sum()
        of_w[row, where] = -(dv[row, where].transpose(0, 1) @ state.transpose(1, 2)).transpose(0, 1)
    of_q, of_k, of_totals = torch.autograd.grad(loss, (q, k, totals))
    exact = [of_q, of_k, of_totals / math.log(2), of_w]  # theirs is the gradient of logarithms of base e
    given = [x.detach().cuda() for x in (q, k, v, do, h, dh, w, totals)]
    found = chunk_gradients(*given, None, dv.cuda(), 0.3, False, None if bounds is None else torch.tensor(bounds).cuda(), size,
                            None if indices is None else indices.cuda())
    assert found[2] is not None
    assert_near([x.cpu() for x in (found[0], found[1], found[3], found[2])], exact, 1e-5)


def test_the_variants_of_a_kernel_are_compiled_before_one_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling them in turn, with Triton's own measurements, took 76 s for a gated delta rule."""
    from fla.modules.causal_conv1d.ops import causal_conv1d_fwd_kernel
    from triton.runtime.autotuner import Autotuner

    layers = [causal_conv1d_fwd_kernel]  # heuristics around the tuner around the function
    while hasattr(layers[-1], "fn") and not hasattr(layers[-1], "device_caches"):
        layers.append(layers[-1].fn)
    kernel, function = next(each for each in layers if isinstance(each, Autotuner)), layers[-1]
    compiled, (cache, *_) = [], function.device_caches[torch.cuda.current_device()]
    monkeypatch.setattr(fla, "_milliseconds", lambda call, quantiles: compiled.append(len(cache)) or [1.0] * len(quantiles))
    kernel.cache.clear()
    monkeypatch.setattr(kernel, "cache_results", False)
    cache.clear()
    torch.ops.megacompile.causal_conv(torch.randn(2, 70, 24).cuda().bfloat16(), torch.randn(24, 4).cuda().bfloat16(), None, "",
                                      "fla")
    kept = [each for each in kernel.configs if each.num_warps <= 8 and each.num_stages <= 3]
    assert compiled == [len(kept)] * len(kept) and 0 < len(kept) < len(kernel.configs)
