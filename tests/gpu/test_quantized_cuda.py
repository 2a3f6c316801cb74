"""Frozen weights in codes on CUDA: losses and gradients are those of the unstreamed model; and Triton kernels of our own."""
from __future__ import annotations

import copy

import pytest
import torch
from test_cuda import batch, build
from tiny_models import assert_same_gradients
from torch import nn

import megacompile
from megacompile.weights.codes import FourBits

pytestmark = pytest.mark.gpu


def test_gradients_in_bfloat16_are_added_to_sums_in_float32_as_pytorch_adds_them() -> None:
    from megacompile.codegen import triton_kernels

    for count in (1, 4096, 9999):
        sums, gradients = torch.randn(count, device="cuda"), torch.randn(count, device="cuda").bfloat16()
        expected = sums + gradients
        triton_kernels.add(sums, gradients)
        assert torch.equal(sums, expected)


@pytest.mark.parametrize("nested", [True, False])
def test_values_of_four_bits_have_the_bits_that_the_host_computes(nested: bool) -> None:
    form, shape = FourBits(nested=nested), (75, 64 * 9)
    codes, scales = (torch.empty(count, dtype=torch.uint8) for count in (form.code_bytes(shape), form.scale_bytes(shape)))
    form.encode(torch.randn(shape).flatten().split(form.piece(shape)), codes, scales, shape)
    for dtype in (torch.float32, torch.bfloat16):
        found = form.decode(codes.cuda(), scales.cuda(), shape, dtype)
        assert torch.equal(found.cpu(), form.decode(codes, scales, shape, dtype))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("stored", ["nf4", "int8", "fp8"])
def test_a_model_with_quantized_weights_trains_as_it_does_natively(stored: str, compiled: bool) -> None:
    native = build(torch.float32)
    for module in native.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.weight.requires_grad_(False)
    native = megacompile.quantize(native, stored)
    model = megacompile.stream(copy.deepcopy(native), device="cuda", compile=compiled)
    native = native.cuda()
    losses = [model(**batch(0)).loss, native(**{name: each.cuda() for name, each in batch(0).items()}).loss]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    assert sum(p.requires_grad for p in native.parameters()) > 10
    assert_same_gradients(model, native, 1e-4, least=1e-7)
    model.megacompile.close()
