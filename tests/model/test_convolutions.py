"""Layers with convolutions stream for any batch size, although PyTorch has other kernels for 16 rows and more."""
from __future__ import annotations

import copy

import pytest
import torch
from test_options import Model
from tiny_models import assert_same_gradients
from torch import Tensor, nn
from torch.backends import mkldnn

import megacompile


class ConvolutionLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(8, 8, 4, groups=8, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.convolution(x.transpose(1, 2))[..., :x.shape[1]].transpose(1, 2)


def test_batches_of_any_size_have_the_gradients_of_native_pytorch() -> None:
    torch.manual_seed(0)
    native = Model(ConvolutionLayer)
    settings = mkldnn.set_flags(None, _fp32_precision=None)
    model = megacompile.stream(copy.deepcopy(native), device="cpu", compile=False)
    assert mkldnn.set_flags(None, _fp32_precision=None) == settings, "the caller's settings are as they were"
    for rows in (2, 15, 16, 40):
        ids = torch.randint(16, (rows, 9), generator=torch.Generator().manual_seed(rows))
        losses = [each(ids, ids) for each in (model, native)]
        for loss in losses:
            loss.backward()
        assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-6)
        assert_same_gradients(model, native)
        model.zero_grad()
        native.zero_grad()
