"""What a model keeps for its optimizers: moments in their formats. Changing it changes tiles and plans, so it happens between
steps."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megacompile.errors import DiskError, MegacompileError
from megacompile.planning.disk_tiles import with_disk
from megacompile.planning.host_needs import check_state
from megacompile.runtime.memory.state_file import StateFile
from megacompile.runtime.memory.state_layout import ElementState
from megacompile.runtime.memory.tiles import TileLayout
from megacompile.runtime.optimizer import native
from megacompile.runtime.optimizer.host_update import definitions
from megacompile.runtime.optimizer.state_format import FLOAT32
from megacompile.sizes import parse_bytes
from megacompile.streaming.replanning import discard_plans
from megacompile.streaming.streamed import Streamed
from megacompile.streaming.user_tensors.owners import require_owner
from megacompile.weights.tiling import Tiling

#: The state that an optimizer needs of parameters: (group, names, model, tiling) -> by name.
StatesOf = Callable[[Mapping[str, Any], Iterable[str], nn.Module, Tiling], Mapping[str, ElementState]]


def keep_groups(states_of: StatesOf, groups: Sequence[Mapping[str, Any]], on_arrival: bool) -> None:
    """Lets each model keep what an optimizer needs of the parameters in these groups. Raises as `keep_states`."""
    of_models: dict[Streamed, dict[str, ElementState]] = {}
    for group in groups:
        for streamed, names in _of_models(group).items():
            of_models.setdefault(streamed, {}).update(states_of(group, names, streamed.model, streamed.tiling))
    for streamed, states in of_models.items():
        keep_states(streamed, states, on_arrival)


def _of_models(group: Mapping[str, Any]) -> dict[Streamed, list[str]]:
    """The names of a group's parameters that the forward reads, by model."""
    found: dict[Streamed, list[str]] = {}
    for parameter in group["params"]:
        streamed, name = require_owner(parameter)
        if name in streamed.states:
            found.setdefault(streamed, []).append(name)
    return found


def check_kept(optimizer: Any, group: Mapping[str, Any]) -> None:
    """Raises `MegacompileError` if the options that say how the state of an optimizer's group is kept have changed."""
    fixed = " and ".join(("state_dtype", "master", *optimizer.more))
    for streamed, names in _of_models(group).items():
        for name, wanted in optimizer.states_of(group, names, streamed.model, streamed.tiling).items():
            memory = streamed.states[name]
            if memory.optimizer is optimizer and not memory.keeps(wanted):
                raise MegacompileError(f"{fixed} cannot change once the optimizer is made, but were changed for {name}: set "
                                       "them back, or make a new optimizer (its moments restart)")


def build_kernels(optimizer: Any, streamed: Streamed) -> None:
    """Builds what the host needs to update tiles, before a step does: all lanes would wait for the C++ compiler."""
    on_host = streamed.backend.device.type == "cpu"  # matrices are updated on the device
    for layout in streamed.tiling.host.values():
        for state in {layout.state_of(i) for i, s in enumerate(layout.slices) if s.trainable}:
            exact = layout.has_remainder
            if not state.whole:
                native.update_library(definitions(optimizer.rule, layout.dtype, exact, state.format))
            elif on_host:
                native.update_library(definitions(optimizer.matrix_rule.momentum, torch.float32, False, state.format))
                native.update_library(definitions(optimizer.matrix_rule.weights, layout.dtype, exact, FLOAT32))


def check_masters(states: Mapping[str, ElementState], tiling: Tiling) -> None:
    """Raises `MegacompileError` for weights without an FP32 master that are not bf16."""
    for name, state in states.items():
        layout = tiling.host[tiling.position[name][0]]
        if not state.exact and layout.dtype != torch.bfloat16:
            raise MegacompileError(f"master='bfloat16' is for bf16 weights, and {name} is {layout.dtype}: leave master out")


def keep_states(streamed: Streamed, states: Mapping[str, ElementState], on_arrival: bool) -> None:
    """From now on the model keeps these states of the named parameters; moments that were kept in another way restart.
    `on_arrival`: no gradients wait in host memory.

    Raises `InsufficientMemoryError`, with what would fit, if the host cannot hold them, `DiskError` if the disk cannot, and
    `MegacompileError` between a forward and the end of its step. Then nothing has changed. With a disk, several ranks call this
    together."""
    check_masters(states, streamed.tiling)
    before, store = streamed.tiling, streamed.store
    tiling = before.with_states(states)
    if tiling.host != before.host or not store.has_moments:
        budget_bytes = store.available_bytes(parse_bytes(streamed.config.host_memory))
        if streamed.config.disk is not None:  # all ranks choose the same tiles
            budget_bytes = min(streamed.together.values("the optimizer's constructor", budget_bytes))
        stays = [tile for tile, layout in tiling.host.items() if layout == before.host[tile] and store.tiles[tile].has_moments]
        tiling = with_disk(tiling, streamed.config, budget_bytes, on_arrival, there=set(stays) & set(before.on_disk),
                           in_memory=set(stays) - set(before.on_disk))
        check_state(tiling, budget_bytes, on_arrival, config=streamed.config)
    if tiling == before:
        return
    new = [tile for tile in tiling.on_disk if store.tiles[tile].file is None or tiling.host[tile] != before.host[tile]]
    if (snapshot := store.snapshot) is not None:  # a checkpoint that is being written reads the state that there is
        snapshot.wait()
    file = _state_file(streamed, [tiling.host[tile] for tile in new]) if new else None
    try:
        discard_plans(streamed, "a new optimizer that keeps other state")
    except BaseException:
        if file is not None:
            file.close()
        raise
    for unused in store.keep(tiling.host, tiling.layouts, tiling.on_disk, file):
        streamed.backend.unpin(unused)  # the system does not take pinned pages back
    streamed.captures.keep(tiling)
    streamed.writes.remainders.clear()


def _state_file(streamed: Streamed, layouts: Sequence[TileLayout]) -> StateFile:
    """A file of this rank for its share of the moments of these tiles, and those of the other ranks of this host. Raises
    `DiskError` and `RankError`; then no file is left."""
    folder, together = Path(streamed.config.disk or ""), streamed.together
    if together.ranks is None:
        return StateFile(folder, layouts)
    made: list[StateFile] = []
    try:
        with together.all_or_none("the optimizer's constructor", DiskError):
            made.append(StateFile(folder, layouts))
        addresses = together.values("the optimizer's constructor", made[0].file.address)
        with together.failing():
            hosts = together.ranks.hosts
            made[0].share([addresses[rank] for rank in hosts.here], hosts.local)
    except BaseException:
        for file in made:
            file.close()
        raise
    return made[0]
