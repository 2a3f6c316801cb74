"""The state of a scheduler: checked as far as it can be known, then loaded or left as it was.

`torch.optim.lr_scheduler` takes whatever it is given; its schedulers are therefore compared with what they are now. Any other
object with `load_state_dict` checks its own state.
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
    """Raises `SchemaError` for a state that one of torch's schedulers cannot have. A name may be missing only in the state of
    another version of torch."""
    if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        schema.like(scheduler.state_dict(), _KNOWN, complete=same_torch)(state, "scheduler")
        schema.must(lambda state: "optimizer" not in state, "without an optimizer")(state, "scheduler")


def load(state: Any, scheduler: Any) -> None:
    """Loads a state, or raises `CheckpointError` and leaves the scheduler as it was."""
    before: Mapping[str, Any] = copy.deepcopy(scheduler.state_dict())
    try:
        scheduler.load_state_dict(state)
    except Exception as error:  # of anybody's class
        scheduler.load_state_dict(before)
        raise CheckpointError(f"{type(scheduler).__name__} cannot load the state that was saved ({named_line(error)}"
                              "): make it as it was made then") from error
