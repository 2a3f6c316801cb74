"""Moves a model's weights into tiles, without a second copy of the model."""
from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megacompile.errors import UnsupportedError
from megacompile.runtime.memory.store import Store
from megacompile.runtime.memory.tile_memory import TileMemory
from megacompile.runtime.memory.tiles import HostTile
from megacompile.runtime.optimizer.host_kernels import split_fp32
from megacompile.system.host_memory import give_back_freed_memory
from megacompile.weights.empty_models import replace_parameters, stand_ins
from megacompile.weights.tiling import Tiling


def build_store(model: nn.Module, tiling: Tiling, memory: TileMemory | None = None) -> Store:
    """Moves the model's parameters into tiles, one tile at a time, and points the parameters there, so that no second copy of
    the model ever exists. A bf16 tile made from fp32 weights keeps their exact remainder. Where another process writes the
    tiles, parameters may be on the meta device; they are replaced.

    Raises `UnsupportedError` if a parameter that is in no tile is on the meta device."""
    if lost := [name for name, p in model.named_parameters() if p.is_meta and name not in tiling.position]:
        raise UnsupportedError(f"the parameter {lost[0]} is on the meta device, and no call of the model reads it: give it a "
                               "value on every rank, or remove it")
    tiles: dict[str, HostTile] = {}
    memory = memory or TileMemory()
    replace_parameters(model, stand_ins(model))
    parameters = dict(model.named_parameters())
    for name, layout in tiling.host.items():
        tile = tiles[name] = memory.allocate(layout)
        flat = layout.flat(tile.weights)
        for s in layout.slices if memory.writes else ():
            place(parameters[s.name].data.flatten(), flat[s.start:s.stop],
                  None if tile.remainder is None else tile.remainder[s.start:s.stop])
        point_parameters(tile, parameters)
        give_back_freed_memory()
    move_rest(model, tiling)
    return tiling.store(tiles)


def move_rest(model: nn.Module, tiling: Tiling) -> None:
    """Moves to the host what is in no tile: buffers, and parameters that no call reads. So after `close()` the whole model is
    on the CPU."""
    for name, parameter in model.named_parameters():
        if name not in tiling.position and parameter.device.type != "cpu":
            parameter.data = parameter.data.cpu()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type != "cpu":
                module._buffers[name] = buffer.cpu()


def place(value: Tensor, weights: Tensor, remainder: Tensor | None, threads: int | None = None) -> None:
    """Writes values, 1-D of any floating dtype, into as many elements of a tile. The bits that bf16 cannot hold go to the
    remainder, computed by `threads` threads (None: all cores)."""
    if remainder is not None and value.dtype != torch.bfloat16:
        high, low = split_fp32(value.detach().cpu().float().contiguous(), threads)
        weights.copy_(high)
        remainder.copy_(low)
    else:
        weights.copy_(value)


def point_parameters(tile: HostTile, parameters: Mapping[str, nn.Parameter]) -> None:
    """Points each parameter at its part of the tile, on the CPU. The `Parameter` objects stay the same."""
    for i, s in enumerate(tile.layout.slices):
        parameters[s.name].data = tile.parameter_view(tile.weights, i)
