"""The forward hooks of a model, in a copy of it: those that the model has now, beside those that only the copy has."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn

_HOOKS_BEFORE, _HOOKS_AFTER = "_forward_pre_hooks", "_forward_hooks"
#: The flags of hooks, by the same keys.
_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
#: Hooks that a copy shares with the model. It runs no backward.
_SHARED = (_HOOKS_BEFORE, _HOOKS_AFTER, "_backward_pre_hooks", "_backward_hooks")


def hooks_of(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """The hooks of a module that are not copied with it, without those of the modules in it."""
    for name in _SHARED:
        yield from vars(module)[name].values()


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
    """State: the keys of the hooks that the copy has from the model. A key is unique in the process."""

    def __init__(self) -> None:
        self._keys: set[int] = set()

    def refresh(self, model: nn.Module, made: nn.Module) -> None:
        """Gives the copy `made` the hooks that the model has now."""
        modules = list(zip(nn.Module.modules(model), nn.Module.modules(made), strict=True))
        copies = {id(ours): theirs for ours, theirs in modules}
        keys = set[int]()
        for ours, theirs in modules:
            for name in (_HOOKS_BEFORE, _HOOKS_AFTER, *_FLAGS):
                there, now = vars(theirs)[name], vars(ours)[name]
                own = {key: value for key, value in there.items() if key not in self._keys and key not in now}
                if name not in _FLAGS:
                    now = {key: _in_copy(there.get(key), _Hook(now, key, _of_copy(hook, copies))) for key, hook in now.items()}
                keys |= now.keys()
                # Hooks with which layers take turns wait for weights before the user's, and release them after these.
                wanted = own | now if name == _HOOKS_BEFORE else now | own
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
