"""Compares the gradients of a streamed model with those of the same model in PyTorch."""
from __future__ import annotations

from torch import nn


def assert_same_gradients(model: nn.Module, native: nn.Module, tolerance: float, least: float = 1e-12) -> None:
    """Each gradient of `model` is within `tolerance` of the norm of `native`'s, plus `least`, and exists where that exists.

    They are compared in float32 on the host: `native` may be on another device and in another dtype. A gradient with NaN fails.
    """
    theirs = dict(native.named_parameters())
    compared = 0
    for name, ours in model.named_parameters():
        expected = theirs[name].grad
        assert (ours.grad is None) == (expected is None), f"{name}: only one has a gradient"
        if ours.grad is None or expected is None:
            continue
        gradient, expected = ours.grad.cpu().float(), expected.cpu().float()
        error, norm = (gradient - expected).norm(), expected.norm()
        assert error <= tolerance * norm + least, f"{name}: {error:.2e} of {norm:.2e}"
        compared += 1
    assert compared, "neither model has gradients"
