"""Weights of models that were made empty: random ones, those of a file, and their move into tiles."""
from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.compat.core import TorchDispatchMode
from megacompile.errors import ArgumentError, UnsupportedError
from megacompile.runtime.memory.store import Store
from megacompile.runtime.memory.tiles import HostTile, TileMemory
from megacompile.runtime.optimizer.host_update import split_fp32
from megacompile.runtime.ranks import Ranks
from megacompile.system.host_memory import give_back_freed_memory
from megacompile.weights.tiling import Tiling


# --------------------
# Models whose weights may not be loaded yet (on the meta device): replacing their parameters, and putting adapters on them.
def put_adapter(model: Any, adapter: Any) -> Any:
    """The model in PEFT's wrapper, with an adapter of this configuration. The model's weights may be on the meta device. The
    adapter has its initial values, on the CPU, in the dtype of the layers under it. Raises `UnsupportedError` for an adapter
    whose initial values depend on the weights, and `ArgumentError` for one that PEFT cannot put on this model, such as one for
    layers that the model does not have."""
    from peft import get_peft_model

    _refuse_values_from_weights(adapter)
    empty = {id(p): p for p in model.parameters() if p.is_meta}
    made = stand_ins(model)  # PEFT puts an adapter on the device of the weights
    replace_parameters(model, made)
    try:
        adapted = get_peft_model(model, copy.deepcopy(adapter), autocast_adapter_dtype=False)  # PEFT writes into it
    except ValueError as error:
        raise ArgumentError(f"PEFT cannot put this adapter on a {type(model).__name__}: name layers that it has\n"
                            f"{error}") from error
    finally:
        back = {id(stand_in): empty[key].requires_grad_(stand_in.requires_grad) for key, stand_in in made.items()}
        replace_parameters(model, back)
    return adapted


def stand_ins(model: nn.Module) -> dict[int, nn.Parameter]:
    """Maps the `id` of each parameter on the meta device to a parameter of its shape and dtype on the CPU, which takes no
    memory and has undefined values."""
    return {id(p): nn.Parameter(torch.zeros((), dtype=p.dtype).expand(p.shape), p.requires_grad)
            for p in model.parameters() if p.is_meta}


def replace_parameters(model: nn.Module, made: Mapping[int, nn.Parameter]) -> None:
    """Replaces parameters of a model, given by their `id`. Tied parameters stay tied."""
    for module in model.modules():
        for name, held in module._parameters.items():
            if held is not None and id(held) in made:
                module._parameters[name] = made[id(held)]


def _refuse_values_from_weights(adapter: Any) -> None:
    first = getattr(adapter, "init_lora_weights", None)
    asked = {"init_lora_weights": first if first not in (True, False, "gaussian") else None,
             **{name: getattr(adapter, name, None) for name in ("use_dora", "modules_to_save", "trainable_token_indices")}}
    if adapter.peft_type != "LORA":
        asked = {"peft_type": str(getattr(adapter.peft_type, "value", adapter.peft_type))}
    if given := [f"{name}={value!r}" for name, value in asked.items() if value]:
        raise UnsupportedError(f"{given[0]} takes the adapter's first values from weights that are not read yet: load the "
                               "model, call peft.get_peft_model on it, and then megacompile.stream")


def fill_buffers(model: nn.Module, ranks: Ranks) -> None:
    """Gives buffers on the meta device rank 0's values. All ranks call this. Raises `RankError`."""
    empty = {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if buffer.is_meta}
    asked = {name for names in ranks.agree("stream", list(empty)) for name in names}
    if not asked:
        return
    named = model.named_buffers(remove_duplicate=False) if ranks.rank == 0 else ()
    values = ranks.agree("stream", {name: buffer.cpu() for name, buffer in named if name in asked})[0]
    for name in empty:
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = values.get(name)


# -------------------- Random weights of a new model, drawn by all cores. They depend on the seed, not on the number of threads
#: Elements of a block, which has its own generator.
BLOCK = 1 << 20
_DRAWS = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)


def draw(model: Any, tiling: Tiling, memory: TileMemory | None = None, threads: int | None = None) -> Store:
    """Allocates the tiles of a model on the meta device, and draws its weights there as transformers initializes a new model.
    The seed comes from the global random number generator. Parameters that no call reads are drawn in memory of their own."""
    memory = memory or TileMemory()
    store = tiling.store({name: memory.allocate(layout) for name, layout in tiling.host.items()})
    made: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if name in tiling.position:
            tile, index = tiling.position[name]
            value = store.tiles[tile].parameter_view(store.tiles[tile].weights, index)
        else:
            value = torch.empty(parameter.shape, dtype=parameter.dtype)
        made[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
    replace_parameters(model, made)
    if memory.writes:
        initialize(model, threads)
    for each in store.tiles.values():
        memory.written(each)
    return store


def initialize(model: Any, threads: int | None = None) -> None:
    """Draws all weights of a model on the CPU as transformers initializes a new model."""
    for module in model.modules():
        module._is_hf_initialized = False
    with torch.no_grad(), _drawn_in_blocks(threads or os.cpu_count() or 1):
        model.initialize_weights()


@contextmanager
def _drawn_in_blocks(threads: int) -> Iterator[None]:
    with ThreadPoolExecutor(threads, "megacompile-draw") as pool, _Blocks(pool):
        yield


class _Blocks(TorchDispatchMode):
    """While it is active, tensors on the CPU are drawn block by block. State: how many tensors have been drawn."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        super().__init__()
        self._pool, self._drawn = pool, 0
        self._seed = int(torch.randint(2**62, ()))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in _DRAWS or not _is_divisible(args[0]) or kwargs.get("generator") is not None:
            return function(*args, **kwargs)
        target, *limits = args
        self._drawn += 1
        seeds = torch.Generator().manual_seed(self._seed + self._drawn)
        blocks = target.view(-1).split(BLOCK)
        drawn = torch.randint(2**62, (len(blocks),), generator=seeds).tolist()

        def draw(block: Tensor, seed: int) -> None:
            function(block, *limits, **{**kwargs, "generator": torch.Generator().manual_seed(seed)})

        for done in [self._pool.submit(draw, block, seed) for block, seed in zip(blocks, drawn, strict=True)]:
            done.result()
        return target


def _is_divisible(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel() > 0


# -------------------- Moves a model's weights into tiles, without a second copy of the model
def build_store(model: nn.Module, tiling: Tiling, memory: TileMemory | None = None) -> Store:
    """Moves the model's parameters into tiles, one tile at a time, and points the parameters there, so that there is never a
    second copy of the model. A bf16 tile made from fp32 weights keeps their exact remainder. If another process writes the
    tiles, parameters may be on the meta device; they are replaced. Raises `UnsupportedError` if a parameter that is in no tile
    is on the meta device."""
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
        memory.written(tile)
        point_parameters(tile, parameters)
        give_back_freed_memory()
    move_rest(model, tiling)
    return tiling.store(tiles)


def move_rest(model: nn.Module, tiling: Tiling) -> None:
    """Moves to the host what is in no tile: buffers, and parameters that no call reads. Then the whole model is on the CPU
    after `close()`."""
    for name, parameter in model.named_parameters():
        if name not in tiling.position and parameter.device.type != "cpu":
            parameter.data = parameter.data.cpu()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type != "cpu":
                module._buffers[name] = buffer.cpu()


def place(value: Tensor, weights: Tensor, remainder: Tensor | None, threads: int | None = None) -> None:
    """Writes values, 1-D of any floating dtype, into as many elements of a tile, of any shape. The bits that bf16 cannot hold
    go to the remainder, computed by `threads` threads (None: all cores)."""
    if remainder is not None and value.dtype != torch.bfloat16:
        high, low = split_fp32(value.detach().cpu().float().contiguous(), threads)
        weights.copy_(high.view(weights.shape))
        remainder.copy_(low.view(weights.shape))
    else:
        weights.copy_(value.view(weights.shape))


def point_parameters(tile: HostTile, parameters: Mapping[str, nn.Parameter]) -> None:
    """Points each parameter at its part of the tile, on the CPU. The `Parameter` objects stay the same."""
    for i, s in enumerate(tile.layout.slices):
        parameters[s.name].data = tile.parameter_view(tile.weights, i)
