"""Checks and loads the state of a learning rate scheduler.

The schedulers of `torch.optim.lr_scheduler` accept any state, so a state is first compared with their current one. Other
objects with `load_state_dict` are expected to check their own state.
"""
from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from megacompile import schema
from megacompile.errors import CheckpointError, named_line

_KNOWN = {"last_epoch": schema.whole(-1, 2**53), "_step_count": schema.whole(0, 2**53)}


def check(state: Any, scheduler: Any, same_torch: bool) -> None:
    """Raises `SchemaError` for a state that one of torch's schedulers cannot have. Keys may be missing only if the state comes
    from another version of torch."""
    if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        schema.like(scheduler.state_dict(), _KNOWN, complete=same_torch)(state, "scheduler")
        schema.must(lambda state: "optimizer" not in state, "without an optimizer")(state, "scheduler")


def load(state: Any, scheduler: Any) -> None:
    """Loads a state, or raises `CheckpointError` and leaves the scheduler as it was."""
    before: Mapping[str, Any] = copy.deepcopy(scheduler.state_dict())
    try:
        scheduler.load_state_dict(state)
    except Exception as error:  # a user's class may raise anything
        scheduler.load_state_dict(before)
        raise CheckpointError(f"{type(scheduler).__name__} cannot load the state that was saved ({named_line(error)}"
                              "): create it with the same arguments as before") from error
