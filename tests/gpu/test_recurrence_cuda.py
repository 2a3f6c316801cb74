"""Kernels of flash-linear-attention for recurrences and short convolutions, against a loop over tokens in float32."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_recurrence import KINDS, SEGMENTS, arguments
from torch import Tensor

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
