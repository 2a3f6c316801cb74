"""What reading a batch needs to know of a streamed model: its captures, one for each form of batch."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.templates.template import TemplateInput
from megacompile.ir.plan import CaptureKey


class Capture(Protocol):
    """The capture that serves one form of batch."""

    @property
    def captured(self) -> CapturedModel: ...

    @property
    def types(self) -> Mapping[str, TemplateInput]:
        """Shape and dtype of each batch argument."""

    @property
    def device(self) -> torch.device:
        """Where its kernels run."""


class Captures(Protocol):
    """All captures of a model. `first`: that of plain batches; `parameters`: names of the parameters of the model's forward."""

    @property
    def first(self) -> Capture: ...

    @property
    def parameters(self) -> frozenset[str]: ...

    def capture_key(self, further: tuple[str, ...], training: bool, images: int = 1) -> CaptureKey:
        """The form of a batch with `further` arguments and `images` for each sequence."""

    def serve(self, key: CaptureKey) -> Capture:
        """The capture that serves a key. The first call with a key traces the model."""

    def reads_masks(self, key: CaptureKey) -> bool:
        """Whether our attention serves batches of the key."""

    def check_modes(self, captured: CapturedModel) -> None:
        """Raises `UnsupportedError` if modules inside the model are in another mode than in the capture."""
