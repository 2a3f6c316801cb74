"""Tensors over a tile's memory that users hold.

In native PyTorch every backward creates new gradients. Here gradients always use the same memory of a tile. A user who keeps
`p.grad` beyond `zero_grad()` and the next backward must still keep its values, so before the memory is overwritten, the kept
tensor moves to memory of its own.
"""
from __future__ import annotations

import weakref

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef


class Lent:
    """A tensor over `memory` of a tile that a user was given."""

    def __init__(self, tensor: Tensor, memory: Tensor) -> None:
        self._tensor, self._storage = TensorWeakRef(tensor), StorageWeakRef(tensor.untyped_storage())
        self._address, self._memory = tensor.data_ptr(), memory

    @property
    def kept(self) -> Tensor | None:
        """The tensor, if the user still has it and it still uses this memory."""
        tensor = self._tensor()
        return tensor if tensor is not None and tensor.data_ptr() == self._address else None

    def move(self) -> None:
        """Before the memory is overwritten: a tensor that the user still has gets memory of its own."""
        if (tensor := self.kept) is not None:
            move(tensor, tensor.clone(), self._memory)

    @property
    def has_views(self) -> bool:
        """Whether views of the tensor still use its storage after `move`. They cannot be found and moved. Only for a tensor
        with a storage of its own."""
        return not self._storage.expired()


def move(tensor: Tensor, elsewhere: Tensor, memory: Tensor) -> None:
    """Gives a tensor over `memory` of a tile other memory with the same values."""
    tensor.data = elsewhere
    # An array from `tensor.numpy()` still points to the tile, and keeps only the tensor alive.
    weakref.finalize(tensor, _forget, memory).atexit = False


def _forget(memory: Tensor) -> None:
    """The memory is no longer needed."""
