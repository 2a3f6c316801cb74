"""Python objects that a forward changes: a graph contains their state from when it was made."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from megacompile.errors import CaptureError
from megacompile.frontend.tracing.modes import torch_calls


def refuse_changing_state(model: nn.Module, batch: Mapping[str, Tensor], options: Mapping[str, Any]) -> None:
    """Raises `CaptureError` if `model`, a fake model, computes something else when it is called a second time, for example
    because it counts its calls. State that it only writes (a layer's output, an auxiliary loss) is fine."""
    first = torch_calls(model, batch, options)
    before = _plain_attributes(model)
    second = torch_calls(model, batch, options)
    if first is not None and second is not None and first != second:
        changed = (name for name, value in _plain_attributes(model).items() if before.get(name) != value)
        raise CaptureError(f"{type(model).__name__} computes something else at each call, because its forward changes "
                           f"{next(changed, 'a global')}: keep it in a buffer, and change that outside of forward")


def _plain_attributes(model: nn.Module) -> dict[str, Any]:
    return {f"{path}.{key}" if path else key: value for path, module in model.named_modules()
            for key, value in vars(module).items() if isinstance(value, int | float | str)}
