"""Adapters (PEFT) on a streamed model: state that a capture treats as constant, and calls that bypass PEFT's wrapper."""
from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from megacompile.errors import UnsupportedError


def adapter_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that PEFT has added to a model, by name."""
    if "peft" not in sys.modules:
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


class AdapterStates:
    """Which adapters are active and merged, their scales, and whether they are disabled. These are Python values, and constants
    of the captured graphs. Graphs without adapters are captured when adapters are first disabled. State: the model's adapter
    layers, and their values at capture."""

    def __init__(self, model: nn.Module) -> None:
        self.captured = [(name, layer, _values(layer)) for name, layer in adapter_layers(model).items()]

    def disabled(self) -> bool:
        """Whether all adapters that were on when the model was streamed are disabled now (PEFT's `disable_adapter`)."""
        return bool(self.captured) and all(layer.disable_adapters and not before["disable_adapters"]
                                           for _, layer, before in self.captured)

    def check(self, differentiating: bool) -> None:
        """Raises `UnsupportedError` if an adapter has changed since the capture. Disabling all of them for an evaluation is
        allowed."""
        disabled = self.disabled()
        if disabled and differentiating:
            raise UnsupportedError("adapters are switched off (disable_adapter), and a loss without them has no gradient here: "
                                   "call the model under torch.no_grad(), or leave disable_adapter first")
        for name, layer, before in self.captured:
            now = _values(layer) | ({"disable_adapters": False} if disabled else {})
            if now != before:
                what = next(key for key in before if now[key] != before[key])
                raise UnsupportedError(
                    f"{what} of {name} is {now[what]!r} and was {before[what]!r} when the model was streamed: put it back, or "
                    "close() the model, change it, and stream() it again")


def _values(layer: Any) -> dict[str, Any]:
    return {"active_adapters": list(layer.active_adapters), "disable_adapters": bool(layer.disable_adapters),
            "merged_adapters": list(layer.merged_adapters), "scaling": dict(getattr(layer, "scaling", {}))}


@contextlib.contextmanager
def base_calls_streamed(model: nn.Module, prepare: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """A context in which calls of the model inside PEFT's wrapper go to the wrapper, which streams. `prepare` rewrites their
    keyword arguments. PEFT lets the inner model generate."""
    if not hasattr(model, "get_base_model"):
        yield
        return
    inner: Any = model.get_base_model()  # type: ignore[operator]

    @functools.wraps(inner.forward)  # generation reads the signature
    def forward(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **prepare(kwargs))

    inner.forward = forward
    try:
        yield
    finally:
        del inner.forward
