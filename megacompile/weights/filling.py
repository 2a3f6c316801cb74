"""Stored tensors -> tiles, without a second copy of the model: threads read parts of files directly into tiles.

Each thread has one block of memory in addition, and only where the dtype changes.
"""
from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megacompile.runtime.memory.store import Store
from megacompile.runtime.memory.tile_memory import TileMemory
from megacompile.weights.moving import place
from megacompile.weights.stored_codes import Coded, CodedPart
from megacompile.weights.tiling import Tiling
from megacompile.weights.weight_files import DTYPES, StoredTensor, WeightReader

#: Elements that a thread reads at a time. All threads together take less than a gigabyte in addition to the tiles.
BLOCK_ELEMENTS = 1 << 22
#: Number of reading threads. Disks and network file systems are fast only with many requests at a time.
READERS = max(4, min(16, os.cpu_count() or 1))


@dataclass(frozen=True)
class Part:
    """Elements of a stored tensor from `start` on, and the 1-D memory that they are read into: `weights`, and in a bf16 tile
    also `remainder`."""

    source: StoredTensor
    start: int
    weights: Tensor
    remainder: Tensor | None

    def read(self, reader: WeightReader) -> None:
        dtype = DTYPES[self.source.dtype]
        if dtype == self.weights.dtype:
            reader.read(self.source, self.start, self.weights)
        else:
            block = torch.empty(self.weights.numel(), dtype=dtype)
            reader.read(self.source, self.start, block)
            place(block, self.weights, self.remainder, threads=1)


def fill(model: nn.Module, tiling: Tiling, sources: Mapping[str, StoredTensor | Coded], reader: WeightReader,
         block: int = BLOCK_ELEMENTS, memory: TileMemory | None = None) -> Store:
    """Allocates the tiles of a model whose parameters are on the meta device, reads their values, and puts parameters over the
    tiles into the model. `sources`: stored tensors by the first name of a parameter, or the name of a buffer. Parameters
    without one must have values, which are copied.

    Raises `CheckpointError` for a file that cannot be read; the model is then unchanged."""
    memory = memory or TileMemory()
    with ThreadPoolExecutor(READERS, "megacompile-read") as pool:
        store = tiling.store(dict(zip(tiling.host, pool.map(memory.allocate, tiling.host.values()), strict=True)))
        made: dict[int, nn.Parameter] = {}
        parts: list[Part | CodedPart] = []
        scales = {source.scales for source in sources.values() if isinstance(source, Coded)}
        homes: dict[str, Tensor] = {}  # of codes and scales
        for name, parameter in model.named_parameters():
            value, weights, remainder = _home(name, parameter, tiling, store)
            made[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
            shared = name in tiling.position  # by all ranks; else each has its own
            source = sources.get(name)
            if isinstance(source, Coded) or name in scales:
                homes[name] = weights
            elif source is not None:
                found = list(_parts(source, weights, remainder, block))
                parts.extend(memory.share(found) if shared else found)
            elif memory.writes or not shared:
                assert not parameter.is_meta, f"{name} has no values"
                place(parameter.detach().flatten(), weights, remainder)
        coded = {name: CodedPart(source, homes[name], homes[source.scales])
                 for name, source in sources.items() if isinstance(source, Coded)}
        parts.extend(memory.share([part for name, part in coded.items() if name in tiling.position]))
        parts.extend(part for name, part in coded.items() if name not in tiling.position)
        for name, buffer in model.named_buffers():
            if isinstance(source := sources.get(name), StoredTensor):
                assert buffer.is_contiguous(), f"buffer {name} is not contiguous"
                parts.extend(_parts(source, buffer.view(-1), None, block))
        parts.sort(key=lambda part: (part.source.file, part.source.offset, part.start))  # sequential reads are faster
        try:
            for done in [pool.submit(part.read, reader) for part in parts]:
                done.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    for module in model.modules():
        for name, held in module._parameters.items():
            if held is not None:  # tied parameters stay one object
                module._parameters[name] = made[id(held)]
    return store


def _home(name: str, parameter: nn.Parameter, tiling: Tiling, store: Store) -> tuple[Tensor, Tensor, Tensor | None]:
    """(the parameter's tensor, its elements, their remainder; the last two 1-D): in its tile, or in its own memory if no call
    reads it."""
    if name not in tiling.position:
        value = torch.empty(parameter.shape, dtype=parameter.dtype)
        return value, value.view(-1), None
    tile_name, index = tiling.position[name]
    tile = store.tiles[tile_name]
    part = tile.layout.slices[index]
    remainder = None if tile.remainder is None else tile.remainder[part.start:part.stop]
    return tile.parameter_view(tile.weights, index), tile.layout.flat(tile.weights)[part.start:part.stop], remainder


def _parts(source: StoredTensor, weights: Tensor, remainder: Tensor | None, block: int) -> Iterator[Part]:
    for start in range(0, weights.numel(), block):
        stop = min(start + block, weights.numel())
        yield Part(source, start, weights[start:stop], None if remainder is None else remainder[start:stop])
