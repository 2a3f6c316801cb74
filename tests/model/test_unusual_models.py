"""Models that write buffers, pass on their input, use distributions, or see the whole sequence train exactly."""
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import HandWritten, HandWrittenLayer, batch
from torch import Tensor, nn

import megacompile


class PassesOn(HandWrittenLayer):
    """Returns a tensor that it was given, and cuts values off at a quantile of the normal distribution."""

    def forward(self, x: Tensor, choice: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        quantile = torch.distributions.Normal(0, 1).icdf(torch.tensor(0.05))
        return super().forward(x) + F.relu(x - quantile * choice), choice


class Unusual(HandWritten):
    """Scales of positions are written into a buffer by each forward, others for long sequences; logits are capped, the number
    first."""

    layer_class = PassesOn

    def __init__(self) -> None:
        super().__init__(depth=3, tied=False)
        self.register_buffer("scales", torch.zeros(32), persistent=False)
        self.short, self.long = nn.Buffer(torch.linspace(1, 2, 32)), nn.Buffer(torch.linspace(2, 1, 32))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
            self.scales.copy_(torch.where(positions.max() >= 24, self.long, self.short))
        x, choice = self.embed(input_ids) * self.scales, (input_ids % 2).float().unsqueeze(-1)
        for block in self.blocks:
            x, choice = block(x, choice)
        logits = self.head(self.norm(x * choice + x))
        return self.loss(2.0 * torch.tanh(logits / 2.0), labels)


class SeesAll(HandWrittenLayer):
    """Attention to the whole sequence but padding."""

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:  # type: ignore[override]
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        seen = None if mask is None else mask[:, None, None].bool()
        return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).reshape(b, t, d))


class Encoder(HandWritten):
    layer_class = SeesAll

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, attention_mask)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def padded(rows: int, length: int) -> dict[str, Tensor]:
    """Padding on the right, without labels."""
    given = batch(rows, length)
    mask = (torch.arange(length) < torch.arange(length - rows + 1, length + 1)[:, None]).long()
    return {"input_ids": given["input_ids"], "labels": given["labels"].masked_fill(mask == 0, -100), "attention_mask": mask}


def assert_exact(make: Any, *batches: dict[str, Tensor]) -> None:
    """Loss and gradients of each batch are native PyTorch's."""
    torch.manual_seed(0)
    model = make()
    expected = []
    for inputs in batches:
        model.zero_grad()
        loss = model(**inputs)
        loss.backward()
        expected.append((loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}))
    model.zero_grad()
    streamed = megacompile.stream(model, device="cpu", micro_batch_size=2)
    for inputs, (loss, gradients) in zip(batches, expected, strict=True):
        ours = streamed(**inputs)
        ours.backward()
        torch.testing.assert_close(ours.detach(), loss, rtol=1e-6, atol=0)
        for name, gradient in gradients.items():
            found = streamed.get_parameter(name).grad
            assert (found - gradient).norm() <= 1e-5 * max(gradient.norm(), 1e-3), name
        for parameter in streamed.parameters():
            parameter.grad = None
    streamed.megacompile.close()


@pytest.mark.nightly(held_by=(
    "tests/model/test_unusual_models.py::test_padding_on_the_right_is_seen_by_layers_that_see_all_of_a_sequence",
    "tests/model/test_own_models.py::test_arguments_by_name_are_those_by_place"))
def test_buffers_written_anew_given_tensors_handed_on_and_distributions_train_exactly() -> None:
    assert_exact(Unusual, batch(5, 29), batch(3, 19))


def test_padding_on_the_right_is_seen_by_layers_that_see_all_of_a_sequence() -> None:
    assert_exact(Encoder, padded(5, 29))


@pytest.mark.nightly(
    held_by="tests/model/test_unusual_models.py::test_padding_on_the_right_is_seen_by_layers_that_see_all_of_a_sequence")
@pytest.mark.parametrize("says", [True, False])
def test_what_attention_modules_say_decides_whether_padding_on_the_right_is_seen(says: bool) -> None:
    class Says(SeesAll):
        is_causal = says

    captured = megacompile.frontend.capture(type("Model", (Encoder,), {"layer_class": Says})())
    assert captured.causal is says
