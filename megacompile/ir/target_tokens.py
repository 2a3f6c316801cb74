"""The number of tokens with a target in the micro-batch whose loss is computed, as far as the host knows it.

The op for head and loss leaves out tokens without a target, such as prompts and padding. It needs their number to launch its
kernels. To read it from the device, the host would have to wait until the device has computed all layers.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_known: ContextVar[int | None] = ContextVar("target_tokens", default=None)


@contextmanager
def target_tokens(number: int | None) -> Iterator[None]:
    """A context in which a loss over `number` target tokens is computed. None: the host does not know the number."""
    before = _known.set(number)
    try:
        yield
    finally:
        _known.reset(before)


def known_target_tokens() -> int | None:
    """The number that the innermost context has given, in this thread; None without a context."""
    return _known.get()
