"""Protocols for a streamed model's captures, one for each kind of batch: what reading a batch needs to know of the model."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.templates.template import TemplateInput
from megacompile.ir.plan import CaptureKey


class Capture(Protocol):
    """The capture that serves one kind of batch."""

    @property
    def captured(self) -> CapturedModel: ...

    @property
    def types(self) -> Mapping[str, TemplateInput]:
        """Shape and dtype of each batch argument."""

    @property
    def device(self) -> torch.device:
        """The device that its kernels run on."""


class Captures(Protocol):
    """All captures of a model. `first`: the capture for plain batches."""

    @property
    def first(self) -> Capture: ...

    def capture_key(self, further: tuple[str, ...], training: bool, images: int = 1) -> CaptureKey:
        """The key of a batch with `further` arguments, beside those of plain batches, and `images` for each sequence."""

    def key_at(self, key: CaptureKey, length: int) -> CaptureKey:
        """The key of a capture that also holds at this length; `key` itself if there is none. May trace the model."""

    def serve(self, key: CaptureKey) -> Capture:
        """The capture for a key. The first call with a key traces the model."""

    def reads_masks(self, key: CaptureKey) -> bool:
        """Whether our attention reads the masks of pairs of this key's batches in every layer."""

    def check_modes(self, captured: CapturedModel) -> None:
        """Raises `UnsupportedError` if a module inside the model was in another mode (training or evaluation) when it was
        captured."""
