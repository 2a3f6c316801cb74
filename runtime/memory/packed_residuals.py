"""How residuals lie in one buffer of bytes: each piece of memory once, with residuals that are views of it as views again.

Kernels are compiled for the strides of their inputs, so a residual that comes back from the host must have its own strides. Two
residuals may be views of one piece of memory, with gaps, overlaps or strides of 0: the piece is copied once, as it is. On the
device each piece has memory of its own again, of the size that the allocator has just got back.
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
    """A tensor in a piece of memory. `start`: its first byte there."""

    piece: int
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, memory: Tensor) -> Tensor:
        stop = self.start + _span(self.shape, self.stride) * self.dtype.itemsize
        return memory[self.start:stop].view(self.dtype).as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Packing:
    """`pieces`: the range of each piece of memory in a buffer. `views`: the residuals in order, numbers as they are."""

    pieces: tuple[slice, ...]
    views: tuple[Any, ...]

    @property
    def bytes(self) -> int:
        """The size of the buffer."""
        return self.pieces[-1].stop if self.pieces else 0

    def residuals(self, memory: Sequence[Tensor]) -> tuple[Any, ...]:
        """The residuals in these pieces of memory, uint8."""
        return tuple(view.of(memory[view.piece]) if isinstance(view, _View) else view for view in self.views)


@dataclass(eq=False)
class FetchedResiduals:
    """Residuals in device memory of their own, a uint8 tensor for each piece; none before they are fetched."""

    memory: tuple[Tensor, ...]
    residuals: tuple[Any, ...] = ()


@dataclass
class _Piece:
    """The bytes of a storage that residuals use."""

    number: int
    storage: Tensor  # uint8
    first: int
    last: int  # exclusive


def packed(residuals: Sequence[Any]) -> tuple[Packing, list[Tensor]]:
    """Where residuals go in a buffer, and the memory of each piece, uint8."""
    pieces: dict[int, _Piece] = {}
    for tensor in residuals:
        if isinstance(tensor, Tensor):
            first, last = _range(tensor)
            piece = pieces.setdefault(_key(tensor), _Piece(len(pieces), _bytes(tensor), first, last))
            piece.first, piece.last = min(piece.first, first), max(piece.last, last)
    ranges, end = [], 0
    for piece in pieces.values():
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + piece.last - piece.first
        ranges.append(slice(start, end))
    views = tuple(_view(each, pieces[_key(each)]) if isinstance(each, Tensor) else each for each in residuals)
    return Packing(tuple(ranges), views), [piece.storage[piece.first:piece.last] for piece in pieces.values()]


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first one of a tensor to its last one in memory."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _range(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a storage that a tensor uses, rounded down so that its alignment stays, and the end of the last one."""
    first = int(tensor.storage_offset()) * tensor.element_size()
    return first // ALIGNMENT * ALIGNMENT, first + _span(tensor.shape, tensor.stride()) * tensor.element_size()


def _bytes(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _view(tensor: Tensor, piece: _Piece) -> _View:
    start = int(tensor.storage_offset()) * tensor.element_size() - piece.first
    return _View(piece.number, start, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
