"""What an encoder of patches returns and holds, found by running it on fakes: an op in a graph does not show it."""
from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megacompile.compat.core import TorchDispatchMode, pytree
from megacompile.errors import CaptureError, UnsupportedError, first_line
from megacompile.frontend.ops.patch_encoder import PatchEncoder
from megacompile.frontend.templates.refused_ops import draws
from megacompile.frontend.tracing.foreign_errors import TRACING_ERRORS

#: Features along each side of the image that the survey uses.
_SIDE = 4


def survey(encoder: PatchEncoder, name: str) -> int:
    """Runs `encoder`, of the model called `name`, on fakes. Returns the width of a feature, and stores in `encoder` its levels
    and the bytes that it holds. Raises `UnsupportedError` if it draws random numbers or counts batches, `CaptureError` if it
    does not run, or does not give one feature for each `per_feature` patches."""
    if any(getattr(module, "track_running_stats", False) for module in encoder.modules()):
        raise UnsupportedError(f"the encoder of {name} keeps running statistics of batches, which its backward would count "
                               "twice: stream it for text alone, without images in the example")
    side = _SIDE * math.isqrt(encoder.per_feature)
    sizes = torch.tensor([[1, side, side]])
    weights = [p for p in encoder.parameters() if p.requires_grad]
    some: Any = next(encoder.parameters())
    with some.fake_mode:
        patches = torch.empty(side**2, *encoder.patch, dtype=some.dtype)
    forward, backward = _Watch(weights), _Watch(weights)
    # Outside of the fakes' mode, so that values computed only from sizes are real.
    with torch.inference_mode(False):
        try:
            with torch.no_grad(), forward:
                levels = encoder.features_by_level(patches, sizes)
            if weights:
                gradient = torch.empty_like(torch.cat(levels, -1))
                with torch.enable_grad(), backward:
                    encoder(patches, sizes, (gradient, weights))
        except TRACING_ERRORS as reason:
            raise CaptureError(f"the encoder of {name} does not run on an image of {side} x {side} patches {[*encoder.patch]} "
                               f"({first_line(reason)}): stream it for text alone, without images in the example") from reason
    shapes = {tuple(level.shape) for level in levels}
    if len(shapes) > 1 or levels[0].shape[0] * encoder.per_feature != side**2:
        raise CaptureError(f"the encoder of {name} makes {sorted(shapes)} of {side**2} patches, not one feature for each "
                           f"{encoder.per_feature}: stream it for text alone, without images in the example")
    if forward.random is not None:
        raise UnsupportedError(f"the encoder of {name} draws random numbers ({forward.random}), which its backward would draw "
                               "again: set its dropout to 0")
    encoder.levels = len(levels)
    encoder.held_bytes = -(-forward.most // side**2), -(-backward.most // side**2)
    return levels[0].shape[1]


class _Watch(TorchDispatchMode):
    """State: the bytes of all tensors made within that are `held`, the `most` at once, and an op that draws random numbers. A
    tensor with the shape of one of the `weights` is taken for its gradient, and not counted: it is a result."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.shapes = {tuple(shape) for w in weights for shape in (w.shape, reversed(w.shape))}
        self.held = self.most = 0
        self.random: str | None = None
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if draws(function, args, kwargs or {}):
            self.random = str(function)
        for value in pytree.tree_leaves(result):
            if isinstance(value, Tensor) and tuple(value.shape) not in self.shapes and (
                    storage := value.untyped_storage())._cdata not in self._known:
                self._known.add(storage._cdata)
                self.held += storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.held)
        return result

    def _freed(self, storage: int, size: int) -> None:
        self._known.discard(storage)
        self.held -= size
