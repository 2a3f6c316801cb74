"""The forward hooks of a model, in a copy of it: those that the model has now, beside those that only the copy has."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn

from megacompile.compat.module_hooks import AFTER_FORWARD, BEFORE_FORWARD, FLAGS


@dataclass(frozen=True, eq=False)
class _Hook:
    """A hook of a module, in the module's copy. It is the same object, so that what it remembers is of both, and does nothing
    once it was removed from the module."""

    there: Mapping[int, Any]
    key: int
    hook: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.hook(*args, **kwargs) if self.key in self.there else None


class CopiedHooks:
    """State: the keys of the hooks that the copy has from the model."""

    def __init__(self) -> None:
        self._keys: set[int] = set()

    def refresh(self, modules: Sequence[tuple[nn.Module, nn.Module]]) -> None:
        """Gives the modules of the copy the hooks that those of the model have now. `modules`: one of each, in pairs."""
        copies = {id(ours): theirs for ours, theirs in modules}
        keys = set[int]()
        for ours, theirs in modules:
            for name in (BEFORE_FORWARD, AFTER_FORWARD, *FLAGS):
                there, now = vars(theirs)[name], vars(ours)[name]
                own = {key: value for key, value in there.items() if key not in self._keys and key not in now}
                if name not in FLAGS:
                    now = {key: _in_copy(there.get(key), _Hook(now, key, _of_copy(hook, copies))) for key, hook in now.items()}
                keys |= now.keys()
                # Hooks with which layers take turns wait for weights before the user's, and release them after these.
                wanted = own | now if name == BEFORE_FORWARD else now | own
                if list(wanted.items()) != list(there.items()):
                    there.clear()
                    there.update(wanted)
        self._keys = keys


def _in_copy(kept: Any, made: _Hook) -> _Hook:
    """The hook that the copy has already, if it is the same: code that was compiled for the copy would be compiled again."""
    return kept if isinstance(kept, _Hook) and kept.hook == made.hook else made


def _of_copy(hook: Callable[..., Any], copies: Mapping[int, nn.Module]) -> Callable[..., Any]:
    """The hook; if it is a method of one of the model's modules, that of the module's copy."""
    if isinstance(hook, MethodType) and id(hook.__self__) in copies:
        return MethodType(hook.__func__, copies[id(hook.__self__)])
    return hook
