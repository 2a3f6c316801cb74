"""Dropout: the distribution of PyTorch's, the same masks in forward and recompute, under any plan, and after `manual_seed`."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from tiny_models import batch
from torch import Tensor, nn

import megacompile
from megacompile.frontend.graph import randomness

P, ROWS = 0.3, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project, self.drop = nn.LayerNorm(16), nn.Linear(16, 48), nn.Dropout(P)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.project(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=P if self.training else 0.0)
        return x + self.drop(F.gelu(mixed.transpose(1, 2).flatten(2)))


class Dropping(nn.Module):
    """Drops embeddings, positions that all rows share, weights of attention, and what layers add."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions, self.drop = nn.Embedding(64, 16), nn.Embedding(32, 16), nn.Dropout(P)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 64)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        places = self.drop(self.positions(torch.arange(input_ids.shape[1], device=input_ids.device)))
        x = self.drop(self.tokens(input_ids)) + places
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.drop(x))
        return logits, None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


PLANS: dict[str, dict[str, Any]] = {
    "micro-batches, K = 2": {"micro_batch_size": 2, "checkpoint_interval": 2},
    "one micro-batch": {"micro_batch_size": ROWS},
    "residuals are kept": {"micro_batch_size": 2, "saved_layers": 2},
}


@pytest.fixture(scope="module", autouse=True)
def one_capture() -> Iterator[None]:
    """All plans share the capture."""
    from megacompile import api

    capture, known = api.capture, []

    def shared(model: nn.Module, **options: Any) -> Any:
        if type(model) is not Dropping:
            return capture(model, **options)
        known[:] = known or [capture(model, **options)]
        return known[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "capture", shared)
        yield


def gradients(model: nn.Module, seed: int, rows: int = ROWS) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(seed)
    _, loss = model(**batch(1, rows=rows))
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), found


def replayed(seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Dropping]:
    """Native PyTorch's loss and gradients, with the masks that a streamed model draws from the seed."""
    native = Dropping()
    torch.manual_seed(seed)
    state, site = [int(torch.randint(1 << 62, ())), 0, 0, ROWS, ROWS], 0

    def enter(call: int) -> None:
        nonlocal site
        state[1], site = call, 0

    def dropout(x: Tensor, p: float, training: bool, inplace: bool = False) -> Tensor:
        nonlocal site
        site += 1
        return randomness.dropout(x, torch.tensor(state), p, site - 1, 0 if x.dim() == 3 else None)

    def attention(*args: Tensor, **options: Any) -> Tensor:
        nonlocal site
        site += 1
        return randomness.attention_with_dropout(torch.tensor(state), site - 1, *args, **options)

    for number, block in enumerate(native.blocks, 1):
        block.register_forward_pre_hook(lambda *_, number=number: enter(number))
        block.register_forward_hook(lambda *_, number=number: enter(number + 1))
    monkeypatch.setattr(F, "dropout", dropout)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    _, loss = native(**batch(1, rows=ROWS))
    loss.backward()
    monkeypatch.undo()
    return loss.detach(), native


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_has_the_loss_and_gradients_of_native_pytorch_with_the_same_masks(
        plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, native = replayed(7, monkeypatch)
    model = megacompile.stream(Dropping(), device="cpu", **PLANS[plan])
    torch.manual_seed(7)
    _, loss = model(**batch(1, rows=ROWS))
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-6, atol=0)
    tiny_models.assert_same_gradients(model, native)
    model.megacompile.close()


def test_a_seed_repeats_masks_and_each_forward_draws_others() -> None:
    model = megacompile.stream(Dropping(), device="cpu", micro_batch_size=2)
    (first, ours), (again, same) = gradients(model, 3), gradients(model, 3)
    assert torch.equal(first, again) and tiny_models.same_bits(ours, same)
    torch.manual_seed(3)
    losses = {float(model(**batch(1, rows=ROWS))[1].detach()) for _ in range(3)}
    assert len(losses) == 3 and float(first) in losses
    state = torch.get_rng_state()  # what a checkpoint keeps
    after = model(**batch(1, rows=ROWS))[1].detach()
    torch.set_rng_state(state)
    assert torch.equal(model(**batch(1, rows=ROWS))[1].detach(), after)
    model.megacompile.close()


def test_a_whole_step_in_waves_draws_the_masks_of_a_loop() -> None:
    losses, weights = [], []
    for whole in (False, True):
        model = megacompile.stream(Dropping(), device="cpu", micro_batch_size=1, **({"waves": 2} if whole else {}))
        optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(5)
        if whole:
            losses.append(model.megacompile.train_step(batch(1, rows=ROWS), optimizer))
        else:
            _, loss = model(**batch(1, rows=ROWS))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        weights.append(tiny_models.weights(model))
        model.megacompile.close()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-4, atol=1e-5)


def test_evaluation_drops_nothing_and_no_grad_alone_still_does() -> None:
    model, native = megacompile.stream(Dropping(), device="cpu"), Dropping().eval()
    with torch.no_grad():
        dropped, expected = model(**batch(1, rows=ROWS)), native(**batch(1, rows=ROWS))
        for ours, theirs in zip(model.eval()(**batch(1, rows=ROWS)), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
        assert not torch.allclose(dropped[0], expected[0])
    model.megacompile.close()


def test_a_model_without_dropout_leaves_the_generator_alone(model: Any) -> None:
    state = torch.get_rng_state()
    model(**batch(0)).loss.backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_masks_are_of_the_whole_batch_however_it_is_split() -> None:
    def masks(sizes: tuple[int, ...], batch_dim: int) -> Tensor:
        parts, first = [], 0
        for rows in sizes:
            shape = [3, 4, 6]
            shape[batch_dim] = shape[batch_dim] * rows
            parts.append(randomness.kept(shape, torch.tensor([11, 2, first, rows, 6]), P, 1, batch_dim))
            first += rows
        return torch.cat(parts, batch_dim)

    for batch_dim in (0, 1, 2):
        assert torch.equal(masks((6,), batch_dim), masks((1, 3, 2), batch_dim))


def test_masks_are_of_the_right_frequency_and_independent() -> None:
    """Within 5 standard deviations, for every pair of neighbours and of draws that could be alike."""
    count = 1 << 18
    shape = (64, count // 64)
    states = [torch.tensor([seed, call, 0, 64, 64]) for seed in (0, 1, 2**61) for call in (0, 1)]
    masks = [randomness.kept(shape, state, P, site, 0).double() - (1 - P) for state in states for site in (0, 1)]
    variance, limit = P * (1 - P), 5 / count ** 0.5
    for mask in masks:
        assert abs(mask.mean()) < limit * variance ** 0.5
        for shift in (1, 2, 64, shape[1]):
            assert abs((mask.flatten()[shift:] * mask.flatten()[:-shift]).mean() / variance) < limit
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert abs((a * b).mean() / variance) < limit


def test_the_extremes_keep_all_and_nothing() -> None:
    x, state = torch.ones(4, 8), torch.tensor([1, 0, 0, 4, 4])
    assert torch.equal(randomness.dropout(x, state, 0.0, 0, 0), x) and not randomness.dropout(x, state, 1.0, 0, 0).any()


@pytest.mark.parametrize("options", [{"is_causal": True}, {"enable_gqa": True, "scale": 0.3}, {
    "attn_mask": torch.tensor([[True, False], [False, False]])}, {"attn_mask": torch.tensor([[0.0, -9.0], [1.0, 2.0]])}],
    ids=["causal", "grouped", "a mask that hides all", "a bias"])
def test_attention_that_drops_nothing_is_pytorchs(options: dict[str, Any]) -> None:
    length = 2 if "attn_mask" in options else 7
    query, key, value = (torch.randn(3, heads, length, 4) for heads in (4, *((2, 2) if "enable_gqa" in options else (4, 4))))
    found = randomness.attention_with_dropout(torch.tensor([1, 0, 0, 3, 3]), 0, query, key, value, **options)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(query, key, value, **options))


