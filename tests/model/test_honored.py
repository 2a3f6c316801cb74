"""Changes that a model or its caller makes between calls take effect or are refused, never ignored."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from tiny_models import batch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import megacompile
from megacompile.errors import UnsupportedError
from megacompile.frontend.tracing.fake_model import fake_batch, make_fake_model
from megacompile.frontend.tracing.modes import torch_calls
from megacompile.ir.plan import PLAIN, CaptureKey

EVALUATING = CaptureKey(evaluating=True)


class Moody(nn.Module):
    """A decoder whose forward does something else in evaluation mode, or for one sequence; and that reads a buffer."""

    def __init__(self, smoothing: float = 0.0, branch: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(3))
        self.head = nn.Linear(16, 64)
        self.register_buffer("shift", torch.ones(16))
        self.smoothing, self.branch = smoothing, branch

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.tokens(input_ids) + self.shift
        if self.branch and x.shape[0] == 1:
            x = x * 3
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if labels is None:
            return logits, None
        smoothing = self.smoothing if self.training else 0.0
        return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing)


def called(model: Any, key: CaptureKey, size: tuple[int, int]) -> list[str] | None:
    """What a plain run on fakes calls, whole numbers aside."""
    fakes = FakeTensorMode()
    with fakes:
        fake_model = make_fake_model(model, fakes, training=not key.evaluating)
        found = torch_calls(fake_model, fake_batch(model, None, fakes, size), {})
    return None if found is None else [each.text for each in found]


def streamed(**options: Any) -> Any:
    return megacompile.stream(Moody(**options), device="cpu")


def test_a_model_that_differs_in_evaluation_mode_is_evaluated_as_it_is_there() -> None:
    model, native = streamed(smoothing=0.1), Moody(smoothing=0.1)
    for training in (True, False, True):
        model.train(training), native.train(training)
        with torch.no_grad():
            torch.testing.assert_close(model(**batch(0))[1], native(**batch(0))[1])


def test_a_model_that_does_not_differ_is_evaluated() -> None:
    model, native = streamed().eval(), Moody().eval()
    with torch.no_grad():
        torch.testing.assert_close(model(**batch(0))[0], native(**batch(0))[0])


def test_a_branch_on_one_sequence_is_refused_for_one_sequence() -> None:
    model = streamed(branch=True)
    model(**batch(0, rows=2))[1].backward()
    with pytest.raises(UnsupportedError, match="at 1 x 9 the model performs other operations than at larger sizes"):
        model(**batch(0, rows=1))


def test_one_sequence_is_served_where_no_branch_depends_on_it() -> None:
    model, native = streamed(), Moody()
    torch.testing.assert_close(model(**batch(0, rows=1))[1].detach(), native(**batch(0, rows=1))[1].detach())


@pytest.mark.sample(4)
@pytest.mark.parametrize(("build", "key", "size", "same"), [
    (Moody, PLAIN, (1, 17), True), (Moody, PLAIN, (3, 1), True), (Moody, EVALUATING, (3, 17), True),
    (lambda: Moody(branch=True), PLAIN, (1, 17), False), (lambda: Moody(branch=True), PLAIN, (3, 1), True),
    (lambda: Moody(smoothing=0.1), EVALUATING, (3, 17), False), (tiny_models.build, PLAIN, (1, 1), True),
    (lambda: tiny_models.build(attention_dropout=0.1), EVALUATING, (3, 17), False)])
def test_a_plain_run_on_fakes_tells_what_a_model_does_from_what_it_was_captured_to_do(
        build: Any, key: CaptureKey, size: tuple[int, int], same: bool) -> None:
    assert (called(build(), key, size) == called(build(), PLAIN, (3, 17)) is not None) == same


@pytest.mark.parametrize("hidden", [lambda x: F.normalize(x) if len(x) > 1 else x, lambda x: x * float(x.sum() > 0)],
                         ids=["a function of torch that may look at sizes", "a branch on values"])
def test_a_run_that_hides_function_calls_proves_nothing(hidden: Any) -> None:
    model = Moody()
    model.head.register_forward_pre_hook(lambda _, given: hidden(given[0]))
    assert called(model, PLAIN, (3, 17)) is None


@pytest.mark.parametrize("write", [lambda m: m.shift.mul_(3), lambda m: setattr(m, "shift", m.shift * 3)],
                         ids=["in place", "replaced"])
def test_a_buffer_that_was_written_is_used(write: Any) -> None:
    model, native = streamed(), Moody()
    model(**batch(0))[1].backward()
    for each in (model, native):
        write(each)
    torch.testing.assert_close(model(**batch(0))[1].detach(), native(**batch(0))[1].detach())


def test_a_batch_that_is_refilled_before_its_backward_changes_nothing(model: Any, native: Any) -> None:
    given = batch(0)
    loss = model(**given).loss
    for tensor in given.values():
        tensor.fill_(1)
    loss.backward()
    native(**batch(0)).loss.backward()
    for ours, theirs in zip(model.parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_a_first_call_in_inference_mode_leaves_the_model_usable() -> None:
    model = megacompile.stream(tiny_models.build(num_hidden_layers=1), device="cpu")
    with torch.inference_mode():
        model(**batch(0))
    loss = model(**batch(0)).loss
    loss.backward()
    assert torch.isfinite(loss)


def test_whole_steps_in_inference_mode_leave_the_model_usable() -> None:
    model, given = megacompile.stream(tiny_models.build(num_hidden_layers=1), device="cpu"), batch(0)
    with torch.inference_mode():
        optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
        losses = [float(model.megacompile.train_step(given, optimizer))]
    losses.append(float(model.megacompile.train_step(given, optimizer)))
    loss = model(**given).loss
    loss.backward()
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert losses[0] > losses[1] > float(loss)


def test_a_sum_over_all_tokens_divided_by_their_number_is_recognized() -> None:
    class Summed(Moody):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
            logits, _ = super().forward(input_ids)
            assert labels is not None
            return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / labels.numel()

    model, native = megacompile.stream(Summed(), device="cpu", micro_batch_size=2), Summed()
    torch.testing.assert_close(model(**batch(0))[1].detach(), native(**batch(0))[1].detach())
