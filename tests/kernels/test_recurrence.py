"""Recurrences and short convolutions equal a loop over tokens in float64, for any length, and with sequences in rows."""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacompile import mixers
from megacompile.compat.fla import chunk_gradients
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


@pytest.mark.parametrize("bounds", [None, [0, 30, 31, 95, 150]], ids=["rows", "sequences"])
def test_the_repair_of_a_kernel_differentiates_each_chunk(bounds: list[int] | None) -> None:
    """`chunk_gradients` beside autograd, for a chunk's results and the state after it."""
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
    found = chunk_gradients(*(x.detach() for x in (q, k)), v, do, h, dh, w, totals.detach(), None, dv, 0.3, False,
                            None if bounds is None else torch.tensor(bounds), size, indices)
    assert found[2] is not None
    assert_near([found[0], found[1], found[3], found[2]], exact, 1e-5)
