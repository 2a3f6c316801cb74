"""Layers with convolutions on CUDA, compiled, for batches on both sides of the sizes at which PyTorch changes its kernels."""
from __future__ import annotations

import copy

import pytest
import torch
from test_convolutions import ConvolutionLayer
from test_options import Model
from tiny_models import assert_same_gradients

import megacompile

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_batches_of_any_size_have_the_gradients_of_native_pytorch(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    native = Model(ConvolutionLayer).to(dtype)
    model = megacompile.stream(copy.deepcopy(native))
    native.double().cuda()
    for rows in (2, 16, 40, 200):
        ids = torch.randint(16, (rows, 9), generator=torch.Generator().manual_seed(rows)).cuda()
        for each in (model, native):
            each.zero_grad()
            each(ids, ids).backward()
        assert_same_gradients(model, native, tolerance, least=1e-6)
