"""Tiles in host memory, which hold the authoritative parameters, gradients and optimizer state.

    tile   weights    parameter dtype    streamed, pinned where the budget allows
           gradients  parameter dtype    streamed, followed by one FP32 norm per parameter
           remainder  int16              low bits of the FP32 master; bf16 tiles only
           m, v       fp32               AdamW's moments, from the first optimizer on
           sums       fp32               gradients added up over the waves of a step, where a plan does that here

A parameter has the same element offset in every part. State: each part is one anonymous mapping, made once.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megacompile.system.host_memory import host_memory
from megacompile.system.shared_memory import SharedMemory

ALIGNMENT = 64  # elements: at least 128 bytes in every dtype, so that no two parameters share a cache line


@dataclass(frozen=True)
class ParameterSlice:
    """Where one parameter lies in its tile, in elements."""

    name: str
    shape: tuple[int, ...]
    start: int
    trainable: bool

    @property
    def stop(self) -> int:
        return self.start + self.count

    @property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class TileLayout:
    """The layout of a tile. All its parameters have one dtype. For a part of a host tile (`tile_part.py`), `home` is the name
    of that tile and `origins` the element at which each slice begins there. `ranks`: how many shards of equal size it is
    divided into (`shards.py`)."""

    name: str
    dtype: torch.dtype
    slices: tuple[ParameterSlice, ...]
    home: str = ""
    origins: tuple[int, ...] = ()
    ranks: int = 1

    @classmethod
    def of(cls, name: str, dtype: torch.dtype, parameters: Iterable[tuple[str, Sequence[int], bool]],
           ranks: int = 1) -> TileLayout:
        slices, position = [], 0
        for parameter, shape, trainable in parameters:
            slices.append(ParameterSlice(parameter, tuple(shape), position, trainable))
            position += -(-slices[-1].count // ALIGNMENT) * ALIGNMENT
        return cls(name, dtype, tuple(slices), ranks=ranks)

    def at_home(self, index: int) -> slice:
        """The elements of a slice in its host tile."""
        s = self.slices[index]
        start = self.origins[index] if self.home else s.start
        return slice(start, start + s.count)

    @property
    def elements(self) -> int:
        """Including the padding after each parameter, and so many that shards are aligned."""
        return -(-self.slices[-1].stop // (ALIGNMENT * self.ranks)) * ALIGNMENT * self.ranks

    @property
    def parameters(self) -> int:
        return sum(s.count for s in self.slices)

    @property
    def trainable(self) -> bool:
        return any(s.trainable for s in self.slices)

    @property
    def weight_bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        """Gradients, then one FP32 norm per parameter."""
        return self.weight_bytes + 4 * len(self.slices)

    @property
    def state_bytes(self) -> int:
        """AdamW's state: moments, and the remainder of bf16 weights."""
        return (10 if self.dtype == torch.bfloat16 else 8) * self.elements if self.trainable else 0

    @property
    def sum_bytes(self) -> int:
        """Bytes of gradients added up over waves, FP32."""
        return 4 * self.elements if self.trainable else 0

    # ---------------------------------------------------------------- one rank's shard, in a slot
    @property
    def shard_bytes(self) -> int:
        """Bytes of a shard of the weights."""
        return self.weight_bytes // self.ranks

    @property
    def reduced_bytes(self) -> int:
        """Bytes of a shard of the gradients, then the norms of all parameters."""
        return self.shard_bytes + 4 * len(self.slices)

    @property
    def shard_state_bytes(self) -> int:
        """Bytes of a shard of AdamW's state."""
        return self.state_bytes // self.ranks

    def host_parts(self) -> dict[str, int]:
        """Bytes that training this tile with AdamW takes, by part."""
        moments = 8 * self.elements if self.trainable else 0
        return {"weights": self.weight_bytes, "gradients": self.gradient_bytes if self.trainable else 0,
                "remainder": self.state_bytes - moments, "moments": moments}

    def host_bytes(self) -> int:
        return sum(self.host_parts().values())

    def shared_pieces(self) -> dict[str, int]:
        """Bytes of every part that a tile of this layout may have, by the name of its piece of `SharedMemory`. What is never
        touched takes no memory."""
        moments = dict.fromkeys(("m", "v", "sums"), self.sum_bytes)
        sizes = self.host_parts() | {"remainder": self.state_bytes - 2 * self.sum_bytes} | moments
        return {f"{self.name} {part}": size for part, size in sizes.items() if size and part != "moments"}

    def state(self, memory: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """m, v (fp32) and the remainder (int16; None of fp32 weights) in a slot's memory."""
        m, v = (memory[4 * i * self.elements:4 * (i + 1) * self.elements].view(torch.float32) for i in (0, 1))
        low = memory[8 * self.elements:self.state_bytes]
        return m, v, low.view(torch.int16) if self.dtype == torch.bfloat16 else None

    def views(self, flat: Tensor) -> tuple[Tensor, ...]:
        """One view per parameter of a flat tensor of at least `elements` elements."""
        return tuple(flat[s.start:s.stop].view(s.shape) for s in self.slices)

    def flat(self, memory: Tensor) -> Tensor:
        """Bytes -> the tile's elements."""
        return memory[:self.weight_bytes].view(self.dtype)

    def norms(self, memory: Tensor) -> Tensor:
        """The norms after the gradients: FP32 [parameters]."""
        return memory[self.weight_bytes:self.gradient_bytes].view(torch.float32)


@dataclass
class HostTile:
    """One tile's host memory."""

    layout: TileLayout
    weights: Tensor  # uint8 [weight_bytes]
    gradients: Tensor | None  # uint8 [gradient_bytes]; None if nothing in it is trained
    remainder: Tensor | None = None  # int16 [elements]
    m: Tensor | None = None
    v: Tensor | None = None
    sums: Tensor | None = None  # fp32 [elements]
    moments_written: bool = False  # by an update or a loaded optimizer; until then they are untouched zeros
    shared: SharedMemory | None = None  # with several ranks: where all parts are
    _prepared: list[Tensor] | None = None  # memory for moments

    @classmethod
    def allocate(cls, layout: TileLayout, shared: SharedMemory | None = None) -> HostTile:
        """Makes a tile, zeros. `shared`: memory for the `shared_pieces` of its layout."""

        def memory(part: str, size: int, inherited: bool = False) -> Tensor:
            return host_memory(size, inherited) if shared is None else shared.piece(f"{layout.name} {part}")

        gradients = memory("gradients", layout.gradient_bytes) if layout.trainable else None
        if gradients is not None and shared is None:
            gradients.zero_()  # touched pages are pinned faster
        remainder = None
        if layout.trainable and layout.dtype == torch.bfloat16:
            remainder = memory("remainder", 2 * layout.elements).view(torch.int16)
        return cls(layout, memory("weights", layout.weight_bytes, inherited=True), gradients, remainder, shared=shared)

    def prepare_moments(self) -> list[Tensor]:
        """Memory that `allocate_moments` will use, and that no page was taken of yet."""
        if self.m is None and self._prepared is None and self.layout.trainable:
            self._prepared = [self._fp32(part) for part in ("m", "v")]
        return self._prepared or []

    def allocate_moments(self) -> None:
        """Allocates AdamW's moments, zeros."""
        if self.m is None and self.layout.trainable:
            self.m, self.v = self.prepare_moments()
            self._prepared = None

    def allocate_sums(self) -> None:
        """Allocates the sums of gradients."""
        self.sums = self._fp32("sums")

    def _fp32(self, part: str) -> Tensor:
        size = 4 * self.layout.elements
        memory = host_memory(size) if self.shared is None else self.shared.piece(f"{self.layout.name} {part}")
        return memory.view(torch.float32)

    def state(self) -> list[Tensor]:
        """The parts of the optimizer state that are allocated."""
        return [part for part in (self.remainder, self.m, self.v) if part is not None]

    def parameter_view(self, memory: Tensor, index: int) -> Tensor:
        """A parameter's part of this tile's weights or gradients, as a tensor with its own storage. For a view of the tile's
        storage, `torch.save` would write the whole tile and `save_pretrained` would clone everything."""
        s = self.layout.slices[index]
        size = self.layout.dtype.itemsize
        part = memory[s.start * size:s.stop * size]
        return torch.frombuffer(part.numpy(), dtype=self.layout.dtype).view(s.shape)

    @property
    def home(self) -> HostTile:
        return self

    @property
    def held(self) -> slice:
        """The elements of a slot of the whole tile that one rank alone copies and updates: all."""
        return slice(0, self.layout.elements)

    @property
    def runs(self) -> list[tuple[slice, slice]]:
        """Elements in a slot, and the same elements of this tile."""
        return [(slice(0, self.layout.elements), slice(0, self.layout.elements))]

    @property
    def norm_bytes(self) -> Tensor | None:
        """uint8, one FP32 gradient norm for each parameter; None if nothing in it is trained."""
        return None if self.gradients is None else self.gradients[self.layout.weight_bytes:self.layout.gradient_bytes]

    def weights_with(self, memory: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes of a slot or slab, and the host's bytes of the same weights."""
        yield memory, self.weights

    def gradients_with(self, memory: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes of a slot or slab, and the host's bytes of the same gradients and norms."""
        assert self.gradients is not None, f"{self.layout.name} has nothing to train"
        yield memory, self.gradients

    def parts(self) -> dict[str, int]:
        """Bytes of each part."""
        named = dict(weights=self.weights, gradients=self.gradients, remainder=self.remainder, m=self.m, v=self.v,
                     sums=self.sums)
        return {name: t.numel() * t.element_size() for name, t in named.items() if t is not None}
