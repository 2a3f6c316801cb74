"""Tensors over a tile's memory that the user holds, and that memory's next values.

Native PyTorch gives every backward gradients of their own. Here they always lie in the same memory of a tile. A user who keeps
`p.grad` over `zero_grad()` and the next backward keeps its values all the same: before the memory is written anew, the tensor
that is kept moves to memory of its own.
"""
from __future__ import annotations

import weakref

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef


class Lent:
    """A tensor that the user was given, over `memory` of a tile."""

    def __init__(self, tensor: Tensor, memory: Tensor) -> None:
        self._tensor, self._storage = TensorWeakRef(tensor), StorageWeakRef(tensor.untyped_storage())
        self._address, self._memory = tensor.data_ptr(), memory

    @property
    def kept(self) -> Tensor | None:
        """The tensor, if the user still has it, over this memory."""
        tensor = self._tensor()
        return tensor if tensor is not None and tensor.data_ptr() == self._address else None

    def move(self) -> None:
        """Before the memory is written anew: if the user still has the tensor, it gets memory of its own."""
        if (tensor := self.kept) is not None:
            move(tensor, tensor.clone(), self._memory)

    @property
    def has_views(self) -> bool:
        """Whether others use the tensor's storage after `move`: views of it, which nobody can find. Only for a tensor with a
        storage of its own."""
        return not self._storage.expired()


def move(tensor: Tensor, elsewhere: Tensor, memory: Tensor) -> None:
    """A tensor over `memory` of a tile gets other memory, with the same values."""
    tensor.data = elsewhere
    # An array of `tensor.numpy()` still points to the tile, and keeps nothing alive but the tensor.
    weakref.finalize(tensor, _forget, memory).atexit = False


def _forget(memory: Tensor) -> None:
    """Nobody needs the memory any more."""
