"""Streamed training is native PyTorch's: first loss and gradients, and the weights after twenty clipped AdamW steps."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import VOCABULARY, build
from torch import Tensor, nn

import megacompile

STEPS, MAX_GRAD_NORM, TOLERANCE = 20, 0.5, 2e-4
#: Without rotary positions a key's bias has no gradient but rounding, which Adam's default eps of 1e-8 would blow up to
#: full steps in random directions, native against native too.
ADAMW = {"lr": 1e-3, "eps": 1e-6}
#: Micro-batches of 2, 2 and 1 sequences; blocks of two layers.
STREAMED = {"device": "cpu", "checkpoint_interval": 2, "micro_batch_size": 2}
SHAPES = ((5, 29), (4, 17))

#: Those that differ in what is streamed: in tied and shared parameters, biases, kinds of layers, and in what makes them.
#: test_frontend.py compares the gradients of every family.
FAMILIES = ("qwen2", "hand_written", *(pytest.param(family, marks=pytest.mark.nightly) for family in (
    "llama", "gpt2", "gpt_neox", "gemma2", "tied")))

Named = dict[str, Tensor]


def fresh_batch(number: int, padded: bool = False, masked: bool = False) -> dict[str, Tensor]:
    """Random input_ids and labels, int64 [rows, length], in one of two shapes by turns. `padded`: each sequence ends in
    padding, whose labels are -100; `masked`: with the attention_mask that says so."""
    rows, length = SHAPES[number % len(SHAPES)]
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    if not padded:
        return {"input_ids": ids, "labels": ids.clone()}
    ends = torch.randint(2, length, (rows, 1), generator=generator)
    mask = (torch.arange(length) < ends).long()
    batch = {"input_ids": ids * mask, "labels": torch.where(mask.bool(), ids, -100)}
    return {**batch, "attention_mask": mask} if masked else batch


def loss_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    out = model(**batch)
    return out if isinstance(out, Tensor) else out.loss


def loss_and_gradients(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Named]:
    """One forward and backward; leaves no `.grad` behind."""
    loss = loss_of(model, batch)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.detach(), gradients


def train(model: nn.Module, optimizer: torch.optim.Optimizer, masked: bool, clip: bool) -> Named:
    """Twenty steps, each on a batch of its own, one of them padded. Returns the weights."""
    for step in range(STEPS):
        loss_of(model, fresh_batch(step, padded=step == 7, masked=masked)).backward()
        if clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            assert norm > MAX_GRAD_NORM, f"step {step}: a gradient of norm {norm} is not clipped"
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@dataclass(frozen=True)
class Outcome:
    """What one way to train gave. `first`: loss and gradients of whole and of padded batches at the initial weights."""

    first: dict[str, tuple[Tensor, Named]]
    weights: Named


@dataclass(frozen=True)
class Pair:
    initial: Named
    streamed: Outcome
    native: Outcome


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    family = request.param
    masked = family != "hand_written"  # which takes no mask; padding on the right needs none
    firsts = {"whole": fresh_batch(100), "padded": fresh_batch(101, padded=True, masked=masked)}
    native = build(family)
    initial = {name: p.detach().clone() for name, p in native.named_parameters()}
    first = {name: loss_and_gradients(native, batch) for name, batch in firsts.items()}
    adamw = torch.optim.AdamW(native.parameters(), foreach=False, **ADAMW)
    native_outcome = Outcome(first, train(native, adamw, masked, clip=True))

    model = megacompile.stream(build(family), **STREAMED)
    try:
        first = {name: loss_and_gradients(model, batch) for name, batch in firsts.items()}
        optimizer = megacompile.AdamW(model.parameters(), max_grad_norm=MAX_GRAD_NORM, **ADAMW)
        yield Pair(initial, Outcome(first, train(model, optimizer, masked, clip=False)), native_outcome)
    finally:
        model.megacompile.close()


@pytest.mark.parametrize("which", ["whole", "padded"])
def test_first_loss_and_gradients_equal_natives(pair: Pair, which: str) -> None:
    (loss, gradients), (native_loss, native_gradients) = pair.streamed.first[which], pair.native.first[which]
    torch.testing.assert_close(loss, native_loss, rtol=1e-6, atol=0)
    assert gradients.keys() == native_gradients.keys()
    for name, expected in native_gradients.items():
        error = float((gradients[name] - expected).norm() / expected.norm())
        assert error <= 1e-5, f"{name}: gradient off by {error:.1e} of its norm"


def test_weights_after_twenty_clipped_steps_equal_natives(pair: Pair) -> None:
    assert pair.streamed.weights.keys() == pair.native.weights.keys()
    for name, expected in pair.native.weights.items():
        error = float((pair.streamed.weights[name] - expected).norm() / expected.norm())
        assert error <= TOLERANCE, f"{name}: off by {error:.1e} of its norm"


def test_twenty_steps_move_every_parameter_far_beyond_the_tolerance(pair: Pair) -> None:
    """Else equal weights would prove nothing."""
    for name, initial in pair.initial.items():
        moved = float((pair.native.weights[name] - initial).norm() / initial.norm())
        assert moved > 10 * TOLERANCE, f"{name} moved by {moved:.1e} of its norm"


# ---- bf16 ------------------------------------------------------------------------------------------------------------


def test_bf16_gradients_are_no_further_from_fp32_than_natives() -> None:
    half = build("qwen2").bfloat16()
    exact = build("qwen2")
    exact.load_state_dict({name: tensor.float() for name, tensor in half.state_dict().items()})
    batch = fresh_batch(0)
    _, true = loss_and_gradients(exact, batch)
    _, natives = loss_and_gradients(half, batch)
    model: Any = megacompile.stream(half, **STREAMED)
    _, ours = loss_and_gradients(model, batch)
    model.megacompile.close()
    assert all(gradient.dtype == torch.bfloat16 for gradient in ours.values())

    def error(gradients: Named) -> float:
        return sum(float((gradients[n].float() - g).norm() / g.norm()) ** 2 for n, g in true.items()) ** 0.5

    assert error(ours) <= 1.1 * error(natives), f"ours {error(ours):.3e}, native bf16 {error(natives):.3e}"
