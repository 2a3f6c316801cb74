"""What a model keeps for its optimizers: moments in their formats. Changing it changes tiles and plans, so it happens between
steps."""
from __future__ import annotations

from collections.abc import Mapping

import torch

from megacompile.errors import MegacompileError
from megacompile.planning.host_needs import check_state
from megacompile.runtime.memory.state_layout import ElementState
from megacompile.sizes import parse_bytes
from megacompile.streaming.replanning import discard_plans
from megacompile.streaming.streamed import Streamed


def keep_states(streamed: Streamed, states: Mapping[str, ElementState]) -> None:
    """From now on the model keeps these states of the named parameters; moments that were kept in another way restart. Does
    nothing if it keeps them already.

    Raises `InsufficientMemoryError`, with what would fit, if the host cannot hold them, and `MegacompileError` between a
    forward and the end of its step. Then nothing has changed."""
    tiling = streamed.tiling.with_states(states)
    if tiling.host == streamed.tiling.host:
        return
    for name, state in states.items():
        layout = tiling.host[tiling.position[name][0]]
        if not state.exact and layout.dtype != torch.bfloat16:
            raise MegacompileError(f"master='bfloat16' is for bf16 weights, and {name} is {layout.dtype}: leave master out")
    check_state(tiling, streamed.store.room(parse_bytes(streamed.config.host_memory)))
    discard_plans(streamed, "a new optimizer that keeps other state")
    streamed.store.keep(tiling.host, tiling.layouts)
    streamed.captures.keep(tiling)
    streamed.writes.remainders.clear()
