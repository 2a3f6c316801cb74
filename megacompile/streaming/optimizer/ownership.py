"""Which of several optimizers updates a parameter: the one that was made for it last, which takes over its state."""
from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from megacompile.errors import MegacompileError
from megacompile.streaming.optimizer.state import OptimizerState, StateMemory


class Ownership:
    """State: the `states` of the parameters that an optimizer updates, the parameter that it lost to a newer one, and whether
    its model was closed."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)  # an optimizer that the user drops is gone at once
        self.states = OptimizerState(optimizer)
        self._lost, self._closed = "", False

    @property
    def optimizer(self) -> Any:
        found = self._optimizer()
        assert found is not None, "only the optimizer itself asks"
        return found

    def check(self) -> None:
        """Raises `MegacompileError` if another optimizer has taken over, or if the model was closed."""
        if self._closed:
            raise MegacompileError("the model of this optimizer was closed, which frees the optimizer's state: call "
                                   "state_dict() before close(), and make a new optimizer after stream()")
        if self._lost:
            raise MegacompileError(f"another optimizer, made later, updates {self._lost} now, and has taken its state: use "
                                   "that one, or make a new optimizer")

    def take_over(self, found: Iterable[tuple[Tensor, StateMemory]]) -> None:
        """Makes this optimizer the only one that updates these parameters. A parameter has one state."""
        found = list(found)
        for _, memory in found:
            if (former := self._other(memory)) is not None:
                former.ownership.lose(memory.name)
                self.optimizer.streamed.optimizer_in_backward.detach(former)
            memory.optimizer = self.optimizer
        for parameter, memory in found:
            self.states.ready(parameter, memory)

    def write_back(self, models: Iterable[Any], drop: bool = False) -> None:
        """As `OptimizerState.write_back`. If it fails, the other ranks that train these streamed models hear of it."""
        with ExitStack() as stack:
            for streamed in models:
                stack.enter_context(streamed.together.failing())
            self.states.write_back(drop)

    def lose(self, parameter: str) -> None:
        """Another optimizer updates the parameter of this name from now on."""
        self._lost, self.states = parameter, OptimizerState(self.optimizer)

    def release(self) -> None:
        """The model is closed, and the state with it."""
        self._closed, self.states = True, OptimizerState(self.optimizer)

    def check_alone(self, doing: str) -> None:
        """Raises `MegacompileError` if another optimizer updates parameters of the model. `doing`: what needs a single
        optimizer."""
        for memory in self.optimizer.streamed.states.values():
            if self._other(memory) is not None:
                raise MegacompileError(f"{doing} one optimizer, and another one updates {memory.name}: make one with parameter "
                                       "groups, or drop the other (del optimizer)")

    def _other(self, memory: StateMemory) -> Any:
        """Another optimizer that updates this parameter."""
        other: Any = memory.optimizer
        if other is None or other is self.optimizer or other.ownership._lost:
            return None
        return other if any(memory.name in names for _, names in other.named_groups()) else None
