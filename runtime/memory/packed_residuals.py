"""How residuals lie in one buffer of bytes: each piece of memory once, with residuals that are views of it as views again.

Kernels are compiled for the strides of their inputs, so a residual that comes back from the host must have its own strides. Two
residuals may be views of one piece of memory, with gaps, overlaps or strides of 0: the piece is copied once, as it is.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Bytes. Each tensor in a buffer is aligned to this, which kernels expect of their inputs.
ALIGNMENT = 128


@dataclass(frozen=True)
class _View:
    """A tensor in a buffer. `start`: its first byte there."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    def of(self, buffer: Tensor) -> Tensor:
        stop = self.start + _span(self.shape, self.stride) * self.dtype.itemsize
        memory = buffer[self.start:stop].view(self.dtype)
        return memory.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Packing:
    """`bytes`: the size of the buffer. `views`: the residuals in order, numbers as they are."""

    bytes: int
    views: tuple[Any, ...]

    def residuals(self, buffer: Tensor) -> tuple[Any, ...]:
        """The residuals in this buffer, uint8 [at least `bytes`]."""
        return tuple(view.of(buffer) if isinstance(view, _View) else view for view in self.views)


@dataclass(eq=False)
class FetchedResiduals:
    """Residuals in device memory of their own, uint8; none before they are fetched."""

    memory: Tensor
    residuals: tuple[Any, ...] = ()


@dataclass
class _Piece:
    """The bytes of a storage that residuals use."""

    memory: Tensor  # uint8, the whole storage
    first: int
    last: int  # exclusive
    start: int = 0  # in the buffer

    @property
    def used(self) -> Tensor:
        return self.memory[self.first:self.last]


def packed(residuals: Sequence[Any]) -> tuple[Packing, list[tuple[slice, Tensor]]]:
    """Where residuals go in a buffer, and the memory (uint8) that belongs into each range of it."""
    pieces: dict[int, _Piece] = {}
    for tensor in residuals:
        if isinstance(tensor, Tensor):
            first, last = _range(tensor)
            piece = pieces.setdefault(_key(tensor), _Piece(_bytes(tensor), first, last))
            piece.first, piece.last = min(piece.first, first), max(piece.last, last)
    end, copies = 0, []
    for piece in pieces.values():
        piece.start, end = end, end + piece.last - piece.first
        copies.append((slice(piece.start, end), piece.used))
        end = -(-end // ALIGNMENT) * ALIGNMENT
    views = tuple(_view(each, pieces[_key(each)]) if isinstance(each, Tensor) else each for each in residuals)
    return Packing(end, views), copies


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first one of a tensor to its last one in memory."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _range(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a storage that a tensor uses, rounded down so that its alignment stays, and the end of the last one."""
    first = int(tensor.storage_offset()) * tensor.element_size()
    count = _span(tensor.shape, tensor.stride())
    return first // ALIGNMENT * ALIGNMENT, first + count * tensor.element_size()


def _bytes(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _view(tensor: Tensor, piece: _Piece) -> _View:
    start = int(tensor.storage_offset()) * tensor.element_size() - piece.first + piece.start
    return _View(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), start)

