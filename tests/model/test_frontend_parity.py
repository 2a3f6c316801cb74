"""Captured models train exactly as native PyTorch does, by every route, at shapes other than the captured one."""
from __future__ import annotations

import pytest
import torch
from captured import CPU, captured
from layerwise import Layerwise
from models import FAMILIES, batch, build
from torch import Tensor, nn

from megacompile import api
from megacompile.frontend import capture, compile_variant
from megacompile.passes import TEMPLATE_PIPELINE
from megacompile.passes.template import Target, accumulate_in_gemm, attention, fuse_loss

ROUTES = pytest.mark.parametrize("saving", [False, True], ids=["recompute", "saving"])
#: Families that differ from others in parts which other tests have too: windows, joined projections, norms elsewhere, a tied
#: head (which "hand_written" has).
ON_DEMAND = ("llama", "mistral", "gpt2", "gpt_neox", "gemma2", "olmo2", "phi3", "qwen3", "tied")


def native(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    out = model(**inputs)
    loss = out if isinstance(out, Tensor) else out.loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same_training(ours: tuple[Tensor, dict[str, Tensor]], reference: tuple[Tensor, dict[str, Tensor]]) -> None:
    loss, gradients = ours
    torch.testing.assert_close(loss, reference[0], rtol=1e-6, atol=0)
    assert gradients.keys() == reference[1].keys()
    for name, gradient in reference[1].items():
        error = (gradients[name] - gradient).norm() / gradient.norm().clamp_min(1e-12)
        assert error <= 1e-5, f"{name}: gradient off by {error:.1e} of its norm"


@pytest.mark.parametrize("family", [pytest.param(family, marks=[pytest.mark.nightly] * (family in ON_DEMAND))
                                    for family in FAMILIES])
@ROUTES
def test_loss_and_gradients_equal_native_autograd(family: str, saving: bool) -> None:
    model, inputs = build(family), batch(5, 29)
    assert_same_training(Layerwise(captured(family), model).loss_and_gradients(inputs, saving), native(model, inputs))


@pytest.mark.parametrize("family", ["qwen2", pytest.param("gemma2", marks=pytest.mark.nightly)])
def test_causal_and_windowed_layers_run_our_attention(family: str) -> None:
    assert captured(family).fused_attention


@pytest.mark.parametrize("family", ["qwen2", "hand_written"])
@ROUTES
def test_ignored_labels_count_for_nothing(family: str, saving: bool) -> None:
    model, inputs = build(family), batch(4, 21, ignored=0.4)
    assert_same_training(Layerwise(captured(family), model).loss_and_gradients(inputs, saving), native(model, inputs))


@pytest.mark.parametrize("family", ["qwen2", pytest.param("gemma2", marks=pytest.mark.nightly), "hand_written"])
def test_micro_batches_with_the_batch_loss_denominator_add_up_to_the_batch(family: str) -> None:
    model, inputs = build(family), batch(5, 29, ignored=0.3)
    layerwise = Layerwise(captured(family), model)
    loss_denominator = captured(family).count_targets(inputs)
    total, sums = torch.zeros(()), {}
    for rows in (slice(0, 2), slice(2, 5)):
        loss, gradients = layerwise.loss_and_gradients({k: v[rows] for k, v in inputs.items()}, False, loss_denominator)
        total = total + loss
        sums = {name: sums[name] + g if sums else g for name, g in gradients.items()}
    assert_same_training((total, sums), native(model, inputs))


@pytest.mark.parametrize(("rows", "length"), [(1, 29), (1, 3)])
def test_batches_and_lengths_below_the_captured_ones_are_exact(rows: int, length: int) -> None:
    model, inputs = build("qwen2"), batch(rows, length)
    assert_same_training(Layerwise(captured("qwen2"), model).loss_and_gradients(inputs, False), native(model, inputs))


@pytest.mark.parametrize("family", ["qwen2", "hand_written"])
def test_both_routes_give_the_same_bits(family: str) -> None:
    layerwise, inputs = Layerwise(captured(family), build(family)), batch(5, 29)
    loss, gradients = layerwise.loss_and_gradients(inputs, saving=False)
    saved_loss, saved = layerwise.loss_and_gradients(inputs, saving=True)
    assert torch.equal(loss, saved_loss)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, saved[name]), name


@pytest.mark.parametrize(("family", "layers", "pipeline"), [
    ("qwen2", 1, (attention,)), *(pytest.param(*other, marks=pytest.mark.nightly) for other in (
        ("gemma2", 2, ()), ("gemma2", 2, (fuse_loss,)), ("qwen2", 1, (accumulate_in_gemm,))))])
def test_every_template_pass_is_optional(family: str, layers: int, pipeline: tuple) -> None:
    model, inputs = build(family, num_hidden_layers=layers), batch(2, 11, ignored=0.2)
    without = captured(family, pipeline, num_hidden_layers=layers)
    assert without.fused_loss == (fuse_loss in pipeline)
    assert_same_training(Layerwise(without, model).loss_and_gradients(inputs, True), native(model, inputs))


def test_a_layer_that_lacks_a_module_gets_a_template_of_its_own_and_the_others_are_exact() -> None:
    """A module that computes nothing leaves no trace of itself in Dynamo's: the others' norms would be left out."""
    model, inputs = build("hand_written"), batch(5, 29)
    model.blocks[0].norm = torch.nn.Identity()
    model.blocks[1].up = torch.nn.Linear(32, 48)  # wider than the others'
    model.blocks[1].down = torch.nn.Linear(48, 32)
    result = capture(model, pipeline=TEMPLATE_PIPELINE, target=CPU)
    assert [call.template for call in result.calls[1:-1]] == ["decoder", "decoder_1", "decoder_2", "decoder_3"]
    assert_same_training(Layerwise(result, model).loss_and_gradients(inputs, False), native(model, inputs))


def test_a_batch_without_targets_gives_nan_and_zero_gradients_as_native_training_does() -> None:
    model, inputs = build("qwen2"), batch(2, 5, ignored=1.0)
    loss, gradients = Layerwise(captured("qwen2"), model).loss_and_gradients(inputs, False)
    native_loss, native_gradients = native(model, inputs)
    assert loss.isnan() and native_loss.isnan()
    assert not any(g.any() for g in [*gradients.values(), *native_gradients.values()])


def test_bf16_gradients_are_as_close_to_fp32_as_native_bf16_is() -> None:
    exact, half = build("qwen2", num_hidden_layers=1), build("qwen2", num_hidden_layers=1).bfloat16()
    for p, q in zip(exact.parameters(), half.parameters(), strict=True):
        p.data.copy_(q.data.float())
    inputs = batch(5, 29)
    _, reference = native(exact, inputs)
    _, theirs = native(half, inputs)
    target = Target("cpu", torch.bfloat16)
    _, ours = Layerwise(api.capture(half, pipeline=TEMPLATE_PIPELINE, target=target), half).loss_and_gradients(inputs, False)

    def error(gradients: dict[str, Tensor]) -> float:
        return sum(float((gradients[n].float() - g).norm() ** 2 / g.norm() ** 2) for n, g in reference.items()) ** 0.5

    assert error(ours) <= 1.1 * error(theirs), (error(ours), error(theirs))


@pytest.mark.parametrize("family", ["qwen2", pytest.param("gpt2", marks=pytest.mark.nightly)])
def test_evaluate_and_logits_equal_the_model(family: str) -> None:
    model, inputs = build(family), batch(4, 13, ignored=0.2)
    layerwise = Layerwise(captured(family), model)
    with torch.no_grad():
        reference = model(**inputs)
    loss, logits = layerwise.evaluate(inputs, "evaluate")
    torch.testing.assert_close(loss, reference.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(logits, reference.logits, rtol=1e-4, atol=1e-5)
    (alone,) = layerwise.evaluate({"input_ids": inputs["input_ids"]}, "outputs")
    assert torch.equal(alone, logits)
    rebuilt = captured(family).output.rebuild(loss, logits)
    assert type(rebuilt) is type(reference) and rebuilt.loss is loss and rebuilt.logits is logits
    assert captured(family).output.rebuild(None, logits).loss is None


@pytest.mark.nightly(
    held_by="tests/model/test_compiled_values.py::test_values_of_tokens_are_compiled_and_train_as_native_pytorch")
@ROUTES
def test_compiled_variants_equal_the_graphs(saving: bool) -> None:
    model, inputs = build("qwen2", num_hidden_layers=1), batch(2, 16)

    def compiled(variant, args):
        return compile_variant(variant, args, "inductor")

    one_layer = captured("qwen2", num_hidden_layers=1)
    ours = Layerwise(one_layer, model, compiled).loss_and_gradients(inputs, saving)
    assert_same_training(ours, native(model, inputs))
