"""Checks a saved optimizer's `state_dict` before anything of it is loaded, and calls the hooks of the load."""
from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from megacompile.errors import MegacompileError
from megacompile.streaming.optimizer.hyper_parameters import KEPT, check_options
from megacompile.streaming.optimizer.state import SavedState


@contextmanager
def load_hooks(optimizer: Any, state_dict: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A context for a load: the state to load, after the hooks that may change it. If it succeeds, the other hooks follow."""
    given = dict(state_dict)
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = before(optimizer, given)
        given = given if changed is None else changed
    yield given
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


def check_saved(optimizer: Any, state_dict: dict[str, Any]) -> tuple[list[dict[str, Any]], list[SavedState]]:
    """The saved options of each group of an `optimizer`, and the saved state of each parameter with its memory.

    Raises `MegacompileError` for other groups, parameters or shapes, and for invalid options."""
    others = ("params", "decoupled_weight_decay")  # also in a state that torch.optim.Adam saved
    groups = [{option: deepcopy(value) for option, value in group.items() if option not in others}
              for group in state_dict["param_groups"]]
    indices = [group["params"] for group in state_dict["param_groups"]]
    if [len(each) for each in indices] != [len(group["params"]) for group in optimizer.param_groups]:
        raise MegacompileError("the saved optimizer has other parameter groups: make it with the groups it was saved with")
    for group, here in zip(groups, optimizer.param_groups, strict=True):
        check_options(group, optimizer.checks, type(optimizer).__name__)
        for option in KEPT:
            if group.setdefault(option, here[option]) != here[option]:
                raise MegacompileError(f"the saved optimizer has {option}={group[option]!r}, and this one {here[option]!r}: "
                                       f"make it with the {option} that it was saved with")
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    states = [(parameter, memory, memory.of_torch(state_dict["state"].get(index, {})))
              for index, parameter in zip(itertools.chain(*indices), parameters, strict=True)
              if (memory := optimizer.memory(parameter)) is not None]
    for _, memory, saved in states:
        memory.check_saved(saved)
    return groups, states
