"""Which tokens of a micro-batch a head computes: those with a target come first, and the others may be left out.

Prompts and padding have no target. The host must know how many tokens have one before it launches kernels. To read the number
from the device, it would have to wait until the device has computed all layers. So the number comes from the batch.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

#: Tokens without a target are left out if they are at least this share of all. Fewer would not pay for copies of the others.
_LEFT_OUT_SHARE = 1 / 8

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


def targets_first(targets: Tensor, ignored: int) -> tuple[Tensor, int] | None:
    """The order of all tokens in which those with a target come first, int64 [N], and how many these are. None if all tokens
    are to be computed. `targets`: int64, N of them, with the value `ignored` where a token has none."""
    known, count = _known.get(), targets.numel()
    if known is None or count - known < _LEFT_OUT_SHARE * count:
        return None
    return torch.sort((targets.flatten() == ignored).to(torch.uint8), stable=True).indices, known
