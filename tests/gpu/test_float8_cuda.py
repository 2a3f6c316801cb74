"""Products in float8 on CUDA: kernels compute what the emulation computes, for any number of tokens, and models train."""
from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from test_cuda import batch, build
from torch import Tensor

import megacompile
from megacompile import Float8
from megacompile.codegen.scaled_products import add_scaled_product, scaled_product
from megacompile.frontend.ops.scaled_linear import quantized
from megacompile.planning.precision import FIRST_CAPABILITY

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < FIRST_CAPABILITY,
    reason="needs a GPU with products in float8")]
RECIPES = [Float8(min_features=128), Float8(min_features=128, scaling="row", gradients="e4m3"),
           Float8(min_features=128, weight_gradients="bfloat16", fast_accumulation="none")]


def close(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def rounded(rows: tuple[int, int], summed: int, form: str, scaling: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random operands of a product, and their scales. The first operand is in `form`, the second in e4m3."""
    torch.manual_seed(0)
    (a, scale_a), (b, scale_b) = (quantized(torch.randn(count, summed, device="cuda", dtype=torch.bfloat16), each, scaling)
                                  for count, each in zip(rows, (form, "e4m3"), strict=True))
    return a, b.t(), scale_a, scale_b.t() if scale_b.dim() else scale_b


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("summed", [256, 250])
@pytest.mark.parametrize("kernel", ["float8", "float8_fast"])
@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
def test_kernels_compute_what_the_emulation_does(scaling: str, summed: int, kernel: str, form: str) -> None:
    operands = rounded((96, 128), summed, form, scaling)
    for dtype in (torch.bfloat16, torch.float32):
        found, expected = (scaled_product(*operands, None, dtype, each) for each in (kernel, "emulated"))
        assert found.dtype == dtype and close(found, expected) < 5e-3
    bias = torch.randn(128, device="cuda", dtype=torch.bfloat16)
    found, expected = (scaled_product(*operands, bias, torch.bfloat16, each) for each in (kernel, "emulated"))
    assert close(found, expected) < 5e-3


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("summed", [4096, 250])
@pytest.mark.parametrize("kernel", ["float8", "float8_fast"])
@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
def test_a_product_is_added_to_what_is_there(scaling: str, summed: int, kernel: str, form: str) -> None:
    operands = rounded((96, 128), summed, form, scaling)
    memory = torch.randn(64 + 96 * 128, device="cuda")
    for offset in (0, 4, 64):  # addresses that are aligned to 16 bytes and more
        sums = memory[offset:offset + 96 * 128].view(96, 128)
        before = memory.clone()
        add_scaled_product(sums, *operands, kernel)
        expected = scaled_product(*operands, None, torch.float32, "emulated")
        added = sums - before[offset:offset + 96 * 128].view(96, 128)
        assert close(added, expected) < 5e-3
        rest = torch.cat((memory[:offset], memory[offset + 96 * 128:]))
        assert torch.equal(rest, torch.cat((before[:offset], before[offset + 96 * 128:])))


@pytest.mark.parametrize("summed", [4096, 250])
def test_a_product_that_is_added_has_the_same_bits_each_time(summed: int) -> None:
    operands = rounded((256, 512), summed, "e4m3", "tensor")
    before = torch.randn(256, 512, device="cuda")
    found = [before.clone() for _ in range(5)]
    for sums in found:
        add_scaled_product(sums, *operands, "float8")
    assert all(torch.equal(sums, found[0]) for sums in found)


def gradients(precision: Float8 | None, **options: Any) -> tuple[float, dict[str, Tensor]]:
    model = megacompile.stream(build(), device="cuda", precision=precision, **options)
    try:
        loss = model(**batch(0)).loss
        loss.backward()
        return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    finally:
        model.megacompile.close()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_gradients_are_those_of_the_emulation(recipe: Float8, compiled: bool) -> None:
    loss, found = gradients(recipe, compile=compiled)
    expected, emulated = gradients(dataclasses.replace(recipe, emulated=True), compile=False)
    assert loss == pytest.approx(expected, rel=2e-3)
    for name, gradient in found.items():
        assert torch.cosine_similarity(gradient.float().flatten(), emulated[name].float().flatten(), dim=0) > 0.98, name


def test_every_plan_gives_the_same_bits() -> None:
    plans: list[dict[str, Any]] = [{"checkpoint_interval": 1}, {"checkpoint_interval": 2}, {"saved_layers": 4},
                                   {"resident": "all"}]
    (loss, first), *others = (gradients(RECIPES[0], compile=False, micro_batch_size=5, **plan) for plan in plans)
    for other, theirs in others:
        assert other == loss and all(torch.equal(gradient, theirs[name]) for name, gradient in first.items())


@pytest.mark.parametrize("recipe", RECIPES[:2], ids=str)
def test_a_model_learns_as_in_bfloat16(recipe: Float8) -> None:
    finals = []
    for precision in (None, recipe):
        model = megacompile.stream(build(), device="cuda", precision=precision)
        optimizer = megacompile.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
        losses = [float(model.megacompile.train_step(batch(0), optimizer)) for _ in range(20)]
        finals.append(losses[-1])
        assert losses[-1] < losses[0] - 0.5
        model.megacompile.close()
    assert finals[1] == pytest.approx(finals[0], rel=0.1)
