"""What a model keeps for its optimizers: moments in their formats. Changing it changes tiles and plans, so it happens between
steps."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megacompile.errors import MegacompileError
from megacompile.planning.host_needs import check_state
from megacompile.runtime.memory.state_layout import ElementState
from megacompile.runtime.optimizer import native
from megacompile.runtime.optimizer.host_update import definitions
from megacompile.runtime.optimizer.rule import Rule
from megacompile.sizes import parse_bytes
from megacompile.streaming.optimizer.hyper_parameters import state_of_group
from megacompile.streaming.replanning import discard_plans
from megacompile.streaming.streamed import Streamed
from megacompile.streaming.user_tensors.owners import require_owner
from megacompile.weights.tiling import Tiling


def keep_groups(rule: Rule, groups: Sequence[Mapping[str, Any]], on_arrival: bool) -> None:
    """Lets each model keep what a rule needs of the parameters in these groups. Raises as `keep_states`."""
    of_models: dict[Streamed, dict[str, ElementState]] = {}
    for group in groups:
        for parameter in group["params"]:
            streamed, name = require_owner(parameter)
            if name in streamed.states:
                of_models.setdefault(streamed, {})[name] = state_of_group(group, rule)
    for streamed, states in of_models.items():
        keep_states(streamed, states, on_arrival)


def check_kept(optimizer: Any, group: Mapping[str, Any]) -> None:
    """Raises `MegacompileError` if the options that say how the state of an optimizer's group is kept have changed."""
    wanted = state_of_group(group, optimizer.rule)
    for parameter in group["params"]:
        memory = optimizer.memory_of(parameter)
        if memory is not None and not memory.keeps(wanted):
            raise MegacompileError(f"state_dtype and master cannot change, and those of {memory.name} have: make a new "
                                   "optimizer, whose moments restart")


def build_kernels(rule: Rule, tiling: Tiling) -> None:
    """Builds what the host needs to update these tiles, before a step does: all lanes would wait for the C++ compiler."""
    for layout in tiling.host.values():
        for state in {layout.state_of(i) for i, s in enumerate(layout.slices) if s.trainable}:
            native.update_library(definitions(rule, layout.dtype, layout.has_remainder, state.format))


def keep_states(streamed: Streamed, states: Mapping[str, ElementState], on_arrival: bool) -> None:
    """From now on the model keeps these states of the named parameters; moments that were kept in another way restart.
    `on_arrival`: no gradients wait in host memory.

    Raises `InsufficientMemoryError`, with what would fit, if the host cannot hold them, and `MegacompileError` between a
    forward and the end of its step. Then nothing has changed."""
    tiling = streamed.tiling.with_states(states)
    for name, state in states.items():
        layout = tiling.host[tiling.position[name][0]]
        if not state.exact and layout.dtype != torch.bfloat16:
            raise MegacompileError(f"master='bfloat16' is for bf16 weights, and {name} is {layout.dtype}: leave master out")
    changed = tiling.host != streamed.tiling.host
    if changed or not streamed.store.has_moments:
        check_state(tiling, streamed.store.room(parse_bytes(streamed.config.host_memory)), on_arrival)
    if not changed:
        return
    discard_plans(streamed, "a new optimizer that keeps other state")
    streamed.store.keep(tiling.host, tiling.layouts)
    streamed.captures.keep(tiling)
    streamed.writes.remainders.clear()
