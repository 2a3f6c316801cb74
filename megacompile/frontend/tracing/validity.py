"""In which other modes, and at which other sizes, a capture holds: those where the model computes the same (`modes.py`)."""
from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from megacompile.frontend.batches.image_patches import model_arguments
from megacompile.frontend.tracing.fake_model import capture_shape
from megacompile.frontend.tracing.modes import RecordedCall, alike, operations, torch_calls
from megacompile.frontend.tracing.trace import Traced, subject, trace
from megacompile.ir.plan import CaptureKey
from megacompile.system.under_way import under_way


class Validity:
    """Where a capture holds. `found`: its trace of `model`, with `layers`, for an `example` and a `key`; `images_apart`: the
    number of images is a size of its own. State: `unlike`, traces that differ, by their own key."""

    def __init__(self, model: nn.Module, layers: tuple[str, ...], example: Mapping[str, Tensor] | None, key: CaptureKey,
                 found: Traced, images_apart: bool) -> None:
        self.model, self.layers, self.example, self.key = model, layers, example, key
        self.images_apart, self.attention, self.size = images_apart, found.attention, capture_shape(key)
        self.performed, self.repeats = operations(found.graph), found.repeats
        self.calls = found.shortened.calls if found.shortened is not None else None
        self.unlike: dict[CaptureKey, Traced] = {}
        self.called = functools.cache(self._called)
        self.holds = functools.cache(self._holds)

    def _called(self, key: CaptureKey, size: tuple[int, int]) -> tuple[RecordedCall, ...] | None:
        fakes, fake_model, batch, options = subject(self.model, self.layers, self.example, key, self.attention, size)
        with fakes:
            return torch_calls(fake_model, model_arguments(batch, key.images), options)

    def _holds(self, training: bool, size: tuple[int, int]) -> bool:
        """Whether the model computes the same in a mode and for a batch of [batch, length] `size`."""
        key = dataclasses.replace(self.key, evaluating=not training)
        exact = size == self.size  # else some whole numbers are sizes
        expected = self.calls if self.calls is not None else self.called(self.key, self.size)
        called = None if expected is None else self.called(key, size)
        if expected is not None and called is not None and alike(called, expected, exact):
            return True
        with recording(), under_way(f"tracing {type(self.model).__name__} in another mode or size"):
            made = trace(self.model, self.layers, self.example, key, size, self.images_apart)
            if made.repeats == self.repeats:
                same = alike(operations(made.graph), self.performed, exact)
            else:  # other layers were traced
                same = alike(self._operations(key, size), self._operations(self.key, self.size), exact)
        if not same and exact and not self.images_apart:
            self.unlike[key] = made
        return same

    def _operations(self, key: CaptureKey, size: tuple[int, int]) -> tuple[RecordedCall, ...]:
        """The operations of a trace with all layers."""
        return operations(trace(self.model, self.layers, self.example, key, size, self.images_apart, whole=True).graph)


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """A context in which gradients are recorded, whatever mode the caller is in: a batch may need another trace in the middle
    of evaluation."""
    with torch.inference_mode(False), torch.enable_grad():
        yield
