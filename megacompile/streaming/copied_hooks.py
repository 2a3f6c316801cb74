"""The forward hooks of a model, in a copy of it: those that the model has now, beside those that only the copy has."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any

from torch import nn

#: Hooks, and the flags of hooks by the same keys, which are of the whole process.
_AFTER = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_BEFORE = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")

Hook = Callable[..., Any]


def hooks_of(module: nn.Module) -> Iterator[Hook]:
    """The forward hooks of a module, without those of the modules in it."""
    for name in (_AFTER[0], _BEFORE[0]):
        yield from vars(module)[name].values()


class CopiedHooks:
    """State: the keys of the hooks that the copy has from the model. A hook is the same object in both, so that what it
    remembers is of both."""

    def __init__(self) -> None:
        self._keys: set[int] = set()

    def refresh(self, model: nn.Module, made: nn.Module) -> None:
        """Gives the copy `made` the hooks that the model has now."""
        modules = list(zip(nn.Module.modules(model), nn.Module.modules(made), strict=True))
        copies = {id(ours): theirs for ours, theirs in modules}
        for ours, theirs in modules:
            for name in (*_BEFORE, *_AFTER):
                there, now = vars(theirs)[name], vars(ours)[name]
                if there or now:
                    own = {key: hook for key, hook in there.items() if key not in self._keys and key not in now}
                    now = {key: _of_copy(hook, copies) for key, hook in now.items()}
                    # Hooks with which layers take turns wait for weights before the user's, and release them after these.
                    there.clear()
                    there.update(own | now if name in _BEFORE else now | own)
        self._keys = _keys(model)


def _keys(model: nn.Module) -> set[int]:
    return {key for module in nn.Module.modules(model) for name in (_AFTER[0], _BEFORE[0]) for key in vars(module)[name]}


def _of_copy(hook: Any, copies: Mapping[int, nn.Module]) -> Any:
    """The hook; if it is a method of one of the model's modules, that of the module's copy. Also a flag, as it is."""
    if isinstance(hook, MethodType) and id(hook.__self__) in copies:
        return MethodType(hook.__func__, copies[id(hook.__self__)])
    return hook
