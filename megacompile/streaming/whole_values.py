"""Whole values of a model that hosts divide: all ranks make one tile at a time whole, and copy from it."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.errors import CheckpointError
from megacompile.runtime.memory.divided import parts_of_run
from megacompile.streaming.streamed import Streamed
from megacompile.weights.saving import memory_in_a_file


def whole_values(streamed: Streamed, parts: Sequence[str], doing: str) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """Each parameter in a tile, by name, with its stored tensors, by their names in a checkpoint. Those in `parts` of the tile
    are whole. Their memory is valid until the next parameter is taken. All ranks take all of them together, in a context
    `failing` of their group. Raises `RankError`."""
    for tile_name in streamed.tiling.host:
        with streamed.store.whole_on_every_host(tile_name, parts, streamed.rank_group.ranks, doing) as tile:
            for position, s in enumerate(tile.layout.slices):
                shaped = ("weight", "remainder", *tile.layout.state_of(position).moments)  # all but scales
                yield s.name, {part: memory.view(s.shape) if part in shaped else memory
                               for part, memory in parts_of_run(tile, position, 0, s.count)}


def with_whole_weights(streamed: Streamed, state: Mapping[str, Any], doing: str,
                       memory: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """A `state_dict` that was made with `keep_vars`, whose weights in tiles are copies of the whole. `memory`: of the copies,
    by name; None: each is a new tensor. All ranks call this. Raises `RankError`."""
    whole: dict[int, Tensor] = {}  # by the parameter's `id`
    with streamed.rank_group.failing():
        for name, values in whole_values(streamed, ("weights",), doing):
            if memory is None or name in memory:
                copied = torch.empty_like(values["weight"]) if memory is None else memory[name]
                whole[id(streamed.parameters[name])] = copied.copy_(values["weight"])
    return {key: whole[id(value)] if id(value) in whole else value.detach() if isinstance(value, Tensor) else value
            for key, value in state.items()}


def whole_weights_in_a_file(streamed: Streamed, directory: Path) -> dict[str, Any]:
    """The model's `state_dict` on rank 0, whose whole weights are in a file without a name on the file system that `directory`
    is saved on; nothing on other ranks. All ranks call this. Raises `CheckpointError`, `RankError`."""
    ranks, layouts = streamed.rank_group.ranks, streamed.tiling.host.values()
    memory, state = dict[str, Tensor](), dict[str, Any]()
    with streamed.rank_group.all_or_none("save_pretrained", CheckpointError):
        if ranks is None or ranks.rank == 0:
            sizes = [layout.weight_bytes for layout in layouts]
            for layout, part in zip(layouts, memory_in_a_file(directory, sum(sizes)).split(sizes), strict=True):
                memory.update(zip((s.name for s in layout.slices), layout.views(layout.flat(part)), strict=True))
            state = nn.Module.state_dict(streamed.model, keep_vars=True)
    return with_whole_weights(streamed, state, "save_pretrained", memory)

