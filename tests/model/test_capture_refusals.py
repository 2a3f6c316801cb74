"""What cannot be streamed faithfully is refused at capture, with the module, the cause and the remedy."""
from __future__ import annotations

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from models import VOCABULARY, HandWritten, HandWrittenLayer, build
from torch import Tensor, nn

from megacompile.errors import CaptureError, MegacompileError, UnsupportedError
from megacompile.frontend import capture, register_layers
from megacompile.frontend.tracing.layers import find_layers


class BranchesOnData(HandWrittenLayer):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x * 2
        return super().forward(x)


class ReadsOnHost(HandWrittenLayer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.sum().item()


class DropsOutInPlace(HandWrittenLayer):
    def __init__(self, width: int, scaled: bool) -> None:
        super().__init__(width, scaled)
        self.drop = nn.Dropout(0.1, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(super().forward(x))


class AddsNoise(HandWrittenLayer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand_like(x)


class HoldsTensor(HandWrittenLayer):
    def __init__(self, width: int, scaled: bool) -> None:
        super().__init__(width, scaled)
        self.table = torch.ones(width)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.table


class ChangesItsInput(HandWrittenLayer):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return super().forward(x)


class FixesLength(HandWrittenLayer):
    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] == 17
        return super().forward(x)


class FixesBatch(HandWrittenLayer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(3, -1, x.shape[-1]))


class Selects(HandWrittenLayer):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + x[x[..., 0] > 0].mean(0)


class ClampsItsWeights(HandWrittenLayer):
    def forward(self, x: Tensor) -> Tensor:
        self.out.weight.data.clamp_(-1, 1)
        return super().forward(x)


class RunsMean(HandWritten):
    """A buffer that a forward reads before it writes it is state."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Buffer(torch.zeros(32))

    def embed(self, input_ids: Tensor) -> Tensor:
        x = super().embed(input_ids)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean((0, 1)) * 0.1)
        return x - self.mean


def stack_of(layer: type[nn.Module]) -> nn.Module:
    return type("Model", (HandWritten,), {"layer_class": layer})(depth=1)


class HasNoStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.tokens(input_ids)).flatten(0, 1), labels.flatten())


class ReturnsMore(HandWritten):
    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": super().forward(input_ids, labels), "extra": torch.ones(3)}


class ReturnsNoLoss(HandWritten):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return logits


class NeedsMore(HandWritten):
    def forward(self, input_ids: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        return super().forward(input_ids, labels) * weights.sum()


class OtherNames(HandWritten):
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return super().forward(tokens, targets)


IDS = torch.zeros(2, 4, dtype=torch.int64)
REFUSED = [
    (BranchesOnData, CaptureError, r"cannot be captured as one graph at .*:\d+ \(if x.sum\(\) > 0"),
    (ReadsOnHost, CaptureError, r"blocks\.0.* reads a tensor's value on the host"),
    (DropsOutInPlace, UnsupportedError, r"blocks\.0\.drop \(Dropout.*draws random numbers.*use F.dropout"),
    (AddsNoise, UnsupportedError, r"blocks\.0 \(AddsNoise.*draws random numbers"),
    (HoldsTensor, CaptureError, r"blocks\.0\.table of Model is neither a parameter nor a buffer"),
    (ChangesItsInput, CaptureError, r"blocks\.0 cannot be differentiated .*change no input in place"),
    (FixesLength, CaptureError, r"Model fixes the length to 17 at .*:\d+ \(assert x.shape.*: compute with"),
    (FixesBatch, CaptureError, r"Model fixes the batch size to 3 at .*:\d+ \(return super.*: compute with"),
    (Selects, CaptureError, r"blocks\.0 \(Selects.*size depends on values \(getitem\): let all sizes be"),
    (ClampsItsWeights, CaptureError, r"blocks\.0 cannot be differentiated .*change no input in place"),
    (RunsMean, CaptureError, r"prologue cannot be differentiated .*change no input in place"),
    (HasNoStack, CaptureError, r"no repeated layer stack found in HasNoStack"),
    (ReturnsMore, UnsupportedError, r"ReturnsMore returns extra of shape \[3\]"),
    (ReturnsNoLoss, UnsupportedError, r"ReturnsNoLoss returns no scalar loss"),
    (NeedsMore, CaptureError, r"NeedsMore.forward needs weights"),
    (OtherNames, CaptureError, r"OtherNames.forward has no parameter input_ids.*example="),
]


@functools.cache
def refusal(model: type[nn.Module]) -> MegacompileError:
    """Why a model, or a model of such a layer, is refused."""
    with pytest.raises(MegacompileError) as refused:
        capture(stack_of(model) if issubclass(model, HandWrittenLayer) else model())
    return refused.value


@pytest.mark.sample(2)
@pytest.mark.parametrize(("model", "error", "message"), REFUSED, ids=[case[2][:40] for case in REFUSED])
def test_what_cannot_be_streamed_is_refused_with_cause_and_remedy(
        model: type[nn.Module], error: type[MegacompileError], message: str) -> None:
    assert isinstance(refusal(model), error)
    assert re.search(message, str(refusal(model)).splitlines()[0]), str(refusal(model))


#: What names its line on one of its own, below the cause.
LINES = [
    (Selects, r"return x \+ x\[x"), (ClampsItsWeights, r"weight\.data\.clamp_\(-1, 1\)"), (AddsNoise, r"torch\.rand_like\(x\)"),
    (ReadsOnHost, r"x\.sum\(\)\.item\(\)"), (ChangesItsInput, r"x\.mul_\(2\)"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("layer", "code"), LINES, ids=[layer.__name__ for layer, _ in LINES])
def test_a_refusal_shows_the_line_of_the_users_code(layer: type[nn.Module], code: str) -> None:
    assert re.search(rf'from source: File ".*test_capture_refusals\.py", line \d+, in forward .*{code}', str(refusal(layer)))


@pytest.mark.parametrize(("example", "message"), [
    ({"tokens": IDS}, "no parameter tokens"),
    ({"input_ids": IDS, "labels": IDS[:, :3]}, r"labels is torch.int64 of shape \[2, 3\]: batch inputs must be integer"),
    ({"input_ids": IDS.float(), "labels": IDS}, "input_ids is torch.float32"),
    ({"input_ids": IDS, "attention_mask": IDS}, "attention_mask"),
])
def test_a_wrong_example_is_refused(example: dict[str, Tensor], message: str) -> None:
    with pytest.raises(MegacompileError, match=message):
        capture(HandWritten(), example=example)


@pytest.mark.parametrize(("layers", "message"), [
    ("nothing.here", r'layers="nothing.here" does not exist in HandWritten.*found: blocks'),
    ("norm", r'layers="norm" is a LayerNorm of 0 modules in HandWritten: name a non-empty'),
])
def test_a_wrong_stack_is_refused_with_the_candidates(layers: str, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(HandWritten(), layers=layers)


def test_a_registered_stack_wins_over_the_largest_list_and_an_explicit_one_over_both() -> None:
    class TwoStacks(HandWritten):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.ModuleList([nn.Linear(2, 2)])

    assert find_layers(TwoStacks()).paths == ("blocks",)
    register_layers(TwoStacks, "small")
    assert find_layers(TwoStacks()).paths == ("small",)
    assert find_layers(TwoStacks(), "blocks").names == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
    with pytest.raises(CaptureError, match="give a subclass of"):
        register_layers(TwoStacks(), "small")


def test_a_branch_on_the_length_becomes_a_condition_that_is_checked() -> None:
    class Branches(HandWrittenLayer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * 2 if x.shape[1] > 8 else x)

    captured = capture(stack_of(Branches))
    assert "T > 8" in captured.guards
    captured.check_shape(2, 9)
    with pytest.raises(UnsupportedError, match="2 x 8 breaks T > 8"):
        captured.check_shape(2, 8)


@pytest.mark.nightly(held_by=(
    "tests/model/test_surface.py::test_eval_mode_gives_the_same_loss",
    "tests/model/test_surface.py::test_two_streamed_models_train_beside_each_other"))
def test_capture_leaves_the_model_as_it_was() -> None:
    model = build("qwen2").eval()
    config, before = model.config.to_dict(), {n: p.clone() for n, p in model.named_parameters()}
    forward = type(model.model.layers[0]).forward
    capture(model)
    assert model.config.to_dict() == config and not model.training
    assert model.config._attn_implementation == "eager"
    assert type(model.model.layers[0]).forward is forward
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
