"""Whether a mask is only read as true and false. A plain run on fakes answers this in a small part of a capture's time."""
from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.errors import CaptureError, UnsupportedError
from megacompile.frontend.tracing.foreign_errors import TRACING_ERRORS
from megacompile.frontend.tracing.native_branches import as_traced
from megacompile.torch_compat.core import TorchDispatchMode, pytree


class _Uses(TorchDispatchMode):
    """State: whether an op has made anything but bool of the mask itself."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask
        self.counted = False

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if any(value is self.mask for value in pytree.tree_leaves((args, kwargs))):
            self.counted |= any(isinstance(made, Tensor) and made.dtype != torch.bool for made in pytree.tree_leaves(result))
        return result


def only_hides(model: nn.Module, batch: Mapping[str, Any], options: Mapping[str, Any], name: str) -> bool:
    """Whether `model(**batch, **options)`, all fakes, makes nothing but bool of the batch argument `name`. False if this
    cannot be known: an op has no effect on fakes, or the model does not run on them."""
    uses = _Uses(batch[name])
    try:
        with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings(), as_traced(model), uses:
            warnings.simplefilter("ignore")
            model(**batch, **options)
    except (UnsupportedError, CaptureError, *TRACING_ERRORS):
        return False
    return not uses.counted
