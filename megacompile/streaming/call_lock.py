"""One thread at a time: calls from several threads run one after the other, in some order.

The lock is held for one call (a forward, a backward, the part of `step()` after its closure), and never while user code runs:
autograd runs the backward of CUDA tensors in a thread of its own, which must get the lock while the caller of `loss.backward()`
waits.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class _HasModel(Protocol):
    """An object whose methods use one streamed model."""

    @property
    def streamed(self) -> Any: ...


M = TypeVar("M", bound=_HasModel)


def exclusive(method: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """Decorates a method that uses the model exclusively: other threads wait."""
    @functools.wraps(method)
    def alone(self: M, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.streamed.call_lock:
            return method(self, *args, **kwargs)
    return alone
