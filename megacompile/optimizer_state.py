"""An optimizer's state whose tensors are memory of tiles, and stay that.

Trainers send an optimizer's state to the model's device, tensor by tensor, by assigning what they moved. Here such an
assignment copies the values to where they belong: gigabytes would otherwise lie on the device, of which no update knows.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor


class ParameterState(dict[str, Any]):
    """The state of one parameter by name. A tensor that is there keeps its memory."""

    def __setitem__(self, key: str, value: Any) -> None:
        held = self.get(key)
        if not isinstance(held, Tensor):
            super().__setitem__(key, value)
        elif value is not held:
            held.copy_(value)


class OptimizerState(defaultdict[Tensor, ParameterState]):
    """That of all parameters: what `torch.optim.Optimizer.state` is."""

    def __init__(self, known: Mapping[Tensor, Mapping[str, Any]]) -> None:
        super().__init__(ParameterState, {parameter: ParameterState(state) for parameter, state in known.items()})

    def __setitem__(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        held = self.get(parameter)
        if held is None:
            super().__setitem__(parameter, ParameterState(state))
            return
        for key, value in state.items():
            held[key] = value
