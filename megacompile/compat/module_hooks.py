"""The private dictionaries in which PyTorch's modules keep their hooks, by keys that are unique in the process."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

BEFORE_FORWARD, AFTER_FORWARD = "_forward_pre_hooks", "_forward_hooks"
#: Hooks of forwards and backwards.
HOOKS = (BEFORE_FORWARD, AFTER_FORWARD, "_backward_pre_hooks", "_backward_hooks")
#: Flags of the hooks of forwards, by the same keys.
FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def hooks_of(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """The hooks of a module, without those of the modules in it."""
    for name in HOOKS:
        yield from getattr(module, name).values()
