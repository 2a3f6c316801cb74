"""Recurrences and short convolutions equal a loop over tokens in float64, for any length, and with sequences in rows."""
from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacompile import mixers
from megacompile.frontend.ops import recurrence

LENGTHS = (1, 17, 63, 64, 65, 128, 1000)


def token_by_token(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None, scale: float) -> Tensor:
    """The definition of the op, for rows of one sequence."""
    heads = value.shape[2]
    query, key = (x.repeat_interleave(heads // x.shape[2], 2) for x in (query, key))
    state = value.new_zeros(value.shape[0], heads, key.shape[3], value.shape[3])
    made = []
    for t in range(value.shape[1]):
        factor = decay[:, t].exp()
        state = state * (factor[..., None] if factor.dim() == 3 else factor[..., None, None])
        new = value[:, t]
        if beta is not None:
            new = beta[:, t, :, None] * (new - (key[:, t, :, None] @ state)[:, :, 0])
        state = state + key[:, t, :, :, None] * new[:, :, None]
        made.append((query[:, t, :, None] @ state)[:, :, 0] * scale)
    return torch.stack(made, 1)


def unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


def arguments(kind: str, rows: int, length: int) -> list[Tensor]:
    """Random arguments: query, key, value, decay and, for a delta rule, beta. Two query heads, four value heads."""
    torch.manual_seed(length)
    query, key = (unit(torch.randn(rows, length, 2, 16)) for _ in range(2))
    channels = (16,) if "channels" in kind else ()
    decay = -4 * torch.rand(rows, length, 4, *channels) ** 4
    found = [query, key, torch.randn(rows, length, 4, 8), decay]
    return [*found, torch.rand(rows, length, 4)] if "delta" in kind else found


def results(call: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """The result of a call and the gradients of its arguments."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = call(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


def assert_near(found: list[Tensor], exact: list[Tensor], bound: float) -> None:
    for ours, theirs in zip(found, exact, strict=True):
        assert (ours.double() - theirs.double()).norm() <= bound * theirs.double().norm().clamp_min(1e-12)


def run(kind: str, segments: Tensor | None = None) -> Callable[..., Tensor]:
    def call(*x: Tensor) -> Tensor:
        return mixers.recurrence(*x[:4], x[4] if len(x) > 4 else None, 0.3, segments)
    return call


KINDS = ("state space", "channels", "delta", "delta of channels")


@pytest.mark.parametrize("kind", KINDS)
def test_a_recurrence_equals_a_loop_over_tokens(kind: str) -> None:
    for length in LENGTHS:
        tensors = arguments(kind, 2, length)
        exact = results(lambda *x: token_by_token(*x[:4], x[4] if len(x) > 4 else None, 0.3), [x.double() for x in tensors])
        assert_near(results(run(kind), tensors), exact, 1e-5)


def sequences(segments: Tensor) -> list[tuple[int, slice]]:
    found = []
    for row, numbers in enumerate(segments):
        cuts = [0, *(numbers.diff().nonzero().flatten() + 1).tolist(), len(numbers)]
        found += [(row, slice(*each)) for each in itertools.pairwise(cuts)]
    return found


SEGMENTS = torch.tensor([[0] * 30 + [1] + [2] * 64 + [3] * 33 + [4] * 2, [0] * 63 + [1] * 1 + [2] * 66]).int()


@pytest.mark.parametrize("kind", KINDS)
def test_no_state_passes_from_one_sequence_to_the_next(kind: str) -> None:
    def apart(*x: Tensor) -> Tensor:
        out = torch.empty_like(x[2])
        for row, where in sequences(SEGMENTS):
            out[row, where] = run(kind)(*(each[row:row + 1, where] for each in x))[0]
        return out

    tensors = arguments(kind, 2, SEGMENTS.shape[1])
    assert_near(results(run(kind, SEGMENTS), tensors), results(apart, tensors), 1e-5)


def convolved(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    taps = weight.shape[1]
    out = F.conv1d(F.pad(x.transpose(1, 2), (taps - 1, 0)), weight[:, None], bias, groups=x.shape[2])
    return F.silu(out).transpose(1, 2)


def test_a_short_convolution_equals_pytorch_s() -> None:
    for length in LENGTHS:
        torch.manual_seed(length)
        tensors = [torch.randn(2, length, 12), torch.randn(12, 4), torch.randn(12)]
        exact = results(convolved, [x.double() for x in tensors])
        assert_near(results(lambda *x: mixers.causal_conv(*x, silu=True), tensors), exact, 1e-5)


def test_a_short_convolution_begins_anew_with_each_sequence() -> None:
    def apart(*x: Tensor) -> Tensor:
        out = torch.empty_like(x[0])
        for row, where in sequences(SEGMENTS):
            out[row, where] = convolved(x[0][row:row + 1, where], *x[1:])[0]
        return out

    tensors = [torch.randn(2, SEGMENTS.shape[1], 12), torch.randn(12, 4), torch.randn(12)]
    found = results(lambda *x: mixers.causal_conv(*x, silu=True, segments=SEGMENTS), tensors)
    assert_near(found, results(apart, tensors), 1e-5)


def test_ops_and_their_fakes_agree() -> None:
    tensors = [x.requires_grad_() for x in arguments("delta", 2, 70)]
    torch.library.opcheck(recurrence.recurrence, (*tensors, 0.3, "neutral", None))
    x = torch.randn(2, 9, 4, requires_grad=True)
    torch.library.opcheck(recurrence.causal_conv, (x, torch.randn(4, 3), None, "", "neutral"))
