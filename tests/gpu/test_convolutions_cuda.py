"""Layers with convolutions on CUDA, compiled, for batches on both sides of the sizes at which PyTorch changes its kernels."""
from __future__ import annotations

import copy

import pytest
import torch
from test_convolutions import ConvolutionModel

import megacompile

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_batches_of_any_size_have_the_gradients_of_native_pytorch(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    native = ConvolutionModel().to(dtype)
    model = megacompile.stream(copy.deepcopy(native))
    native.double().cuda()
    for rows in (2, 16, 40, 200):
        ids = torch.randint(16, (rows, 9), generator=torch.Generator().manual_seed(rows)).cuda()
        for each in (model, native):
            each.zero_grad()
            each(ids, ids).backward()
        for ours, theirs in zip(model.parameters(), native.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            assert (ours.grad.cuda() - theirs.grad).norm() <= tolerance * theirs.grad.norm() + 1e-6
