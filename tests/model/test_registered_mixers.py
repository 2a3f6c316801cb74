"""A custom op that a user registers as a mixer is opaque to captures, known to plans, and holds packed sequences apart."""
from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megacompile
from megacompile.errors import MegacompileError
from megacompile.frontend.ops.mixer_ops import REGISTERED
from megacompile.mixers import register_mixer

WIDTH, VOCABULARY = 8, 32


@torch.library.custom_op("mine::decayed_sum", mutates_args=())
def decayed_sum(x: Tensor, segments: Tensor | None) -> Tensor:
    """Half of the sum so far, and the token: [B, T, D]. Begins anew with each segment, int32 [B, T]."""
    made, state = torch.empty_like(x), torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        if segments is not None and t:
            state = state * (segments[:, t] == segments[:, t - 1])[:, None]
        state = 0.5 * state + x[:, t]
        made[:, t] = state
    return made


@torch.library.custom_op("mine::decayed_sum_backward", mutates_args=())
def decayed_sum_backward(grad: Tensor, segments: Tensor | None) -> Tensor:
    return decayed_sum(grad.flip(1), None if segments is None else segments.flip(1)).flip(1).contiguous()


decayed_sum.register_fake(lambda x, segments: torch.empty_like(x))
decayed_sum_backward.register_fake(lambda grad, segments: torch.empty_like(grad))
decayed_sum.register_autograd(
    lambda ctx, grad: (torch.ops.mine.decayed_sum_backward(grad, *ctx.saved_tensors), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, segments: Tensor | None) -> Tensor:
        return x + self.out(torch.ops.mine.decayed_sum(self.into(x), segments))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None) -> Tensor:
        segments = None if position_ids is None else (position_ids == 0).cumsum(1).to(torch.int32)
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, segments)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.fixture
def registered() -> Iterator[None]:
    register_mixer(torch.ops.mine.decayed_sum, segments="segments", flops=lambda x, segments: 10**6 * x[0] * x[1] * x[2],
                   workspace_bytes=lambda x, segments: 4 * x[0] * x[1] * x[2])
    register_mixer(torch.ops.mine.decayed_sum_backward, flops=lambda grad, segments: 10**6 * grad[0] * grad[1] * grad[2])
    yield
    REGISTERED.clear()


def gradients(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    model(**batch).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def batch(rows: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(length))
    return dict(input_ids=ids, labels=ids.clone())


def test_a_registered_mixer_trains_at_any_length_and_in_packed_rows(registered: None) -> None:
    torch.manual_seed(0)
    native = Model()
    model = megacompile.stream(copy.deepcopy(native), device="cpu")
    positions = torch.cat([torch.arange(5), torch.arange(9), torch.arange(3)])[None].repeat(2, 1)
    for given in (batch(2, 17), batch(3, 40), batch(2, 17) | dict(position_ids=positions)):
        ours, theirs = gradients(model, given), gradients(native, given)
        for name, gradient in theirs.items():
            torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-7)
    model.megacompile.close()


def test_plans_count_the_work_of_a_registered_mixer(registered: None) -> None:
    def step_s() -> float:
        return megacompile.schedule(Model(), batch=4, length=64, hardware="h200").simulate().step_s  # type: ignore[no-any-return]

    counted = step_s()
    REGISTERED.clear()
    assert counted > 1.5 * step_s()


def test_what_cannot_be_registered_is_refused() -> None:
    with pytest.raises(MegacompileError, match=r"mine.decayed_sum has no argument segment: it has x, segments"):
        register_mixer(torch.ops.mine.decayed_sum, segments="segment")
    with pytest.raises(MegacompileError, match=r"megacompile.attention is an op of megacompile: register your own"):
        register_mixer(torch.ops.megacompile.attention)
