"""Values that a later call than the next one reads, and work between layers, train exactly."""
from __future__ import annotations

import engine
import pytest
import torch
import torch.nn.functional as F
from models import HandWritten, HandWrittenLayer, batch
from torch import Tensor, nn

import megacompile


class GivesKeys(HandWrittenLayer):
    """Hands on a second tensor; adds an early layer's where it is given one, and reads of it no more than signs."""

    def __init__(self, width: int, scaled: bool) -> None:
        super().__init__(width, scaled)
        self.keys = nn.Linear(width, width)

    def forward(self, x: Tensor, early: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if early is not None:
            x = x + early
        return super().forward(x), self.keys(x)


class Entangled(HandWritten):
    """A scale between layers, the first layer's keys in the third and (their signs alone) in the loss, the embedding at the
    end, and a head transposed by hand."""

    layer_class = GivesKeys

    def __init__(self) -> None:
        super().__init__(depth=3, tied=False)
        self.between = nn.Parameter(torch.full((32,), 1.1))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        embedded = self.embed(input_ids)
        x, keys = self.blocks[0](embedded)
        x, _ = self.blocks[1](x * self.between)
        x, _ = self.blocks[2](F.silu(x), keys)
        return self.loss(self.head(self.norm(x + embedded + keys.detach().sign())), labels)


class Branches(HandWritten):
    """Layers beside each other: each reads the embedding, the loss the first and the last."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        first, *_, last = [block(x) for block in self.blocks]
        return self.loss(self.head(self.norm(first + last)), labels)


@pytest.mark.parametrize("model_class", [Entangled, pytest.param(Branches, marks=pytest.mark.nightly)])
def test_values_read_further_on_train_exactly(model_class: type[HandWritten]) -> None:
    torch.manual_seed(0)
    model, inputs = model_class(), batch(5, 29)
    loss = model(**inputs)
    loss.backward()
    native = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    streamed = megacompile.stream(model, device="cpu", checkpoint_interval=2, micro_batch_size=2)
    ours = streamed(**inputs)
    ours.backward()
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=0)
    gradients = {name: p.grad for name, p in streamed.named_parameters()}
    for name, gradient in native.items():
        assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    assert not any(gradients[name].any() for name in gradients.keys() - native.keys() if gradients[name] is not None)
    streamed.megacompile.close()


def test_a_call_hands_on_what_later_calls_read_and_nothing_else() -> None:
    model = megacompile.stream(Entangled(), device="cpu", checkpoint_interval=2, micro_batch_size=2)
    calls = {call.name: call for call in engine.captured(model).calls}
    model.megacompile.close()
    carried = {name: [s.index for s in call.sources if s.kind == "carried"] for name, call in calls.items()}
    assert {name: len(indices) for name, indices in carried.items()} == {
        "prologue": 0, "blocks.0": 1, "blocks.1": 3, "blocks.2": 3, "epilogue": 3}
