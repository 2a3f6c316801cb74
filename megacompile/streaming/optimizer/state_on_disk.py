"""Tensors of an optimizer's state whose values are on disk: read when the user asks for one, written back if it was changed.

    moment = optimizer.state[p]["exp_avg"]     reads it into memory of its own
    moment.mul_(0.5)                           counts: the next step, save or `state_dict` writes it back
    optimizer.step()                           from here on `moment` keeps its values; read `optimizer.state` again
"""
from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from megacompile.errors import InsufficientMemoryError, MegacompileError
from megacompile.runtime.memory.moment_file import MomentFile
from megacompile.sizes import format_bytes
from megacompile.system.host_memory import available_host_bytes, host_memory


@dataclass(frozen=True)
class OnDisk:
    """One tensor of a parameter's state in a file: what is kept there under `name` of the parameter at a `position` of a
    tile."""

    file: MomentFile
    tile: str
    position: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        """The values, in memory of their own. Raises `DiskError`, and `InsufficientMemoryError` if they do not fit memory."""
        if self.bytes > (available := available_host_bytes()):
            raise InsufficientMemoryError(
                f"{self.name} of a parameter of {self.tile} is on disk and takes {format_bytes(self.bytes)} of host memory to "
                f"read, and {format_bytes(available)} are available: drop what was read before, or save with save_checkpoint, "
                "which reads a part at a time")
        memory = host_memory(self.bytes)
        self.file.get(self.tile, self.position, self.name, 0, memory)
        return memory.view(self.dtype).view(self.shape)

    def write(self, values: Tensor) -> None:
        """Replaces the values. Raises `DiskError`."""
        flat = values.detach().to("cpu", self.dtype).contiguous().flatten()
        self.file.put(self.tile, self.position, self.name, flat.view(torch.uint8))


class Fetched:
    """A tensor that the user was given, and the values that the disk has."""

    def __init__(self, stored: OnDisk) -> None:
        self.stored, self.tensor = stored, stored.read()
        self._sum = self._checksum()

    def _checksum(self) -> int:
        """CRC-32 of all bytes. It also finds changes that PyTorch does not track."""
        return zlib.crc32(self.tensor.detach().flatten().view(torch.uint8).numpy().data)

    @property
    def changed(self) -> bool:
        return self._checksum() != self._sum

    def written_back(self) -> None:
        self._sum = self._checksum()


class StaleTensor:
    """A tensor that the user may still hold, although a step has begun since it was read. Writes to it are lost."""

    def __init__(self, fetched: Fetched) -> None:
        self.name = fetched.stored.name
        self._tensor, self._version = TensorWeakRef(fetched.tensor), fetched.tensor._version

    @property
    def alive(self) -> bool:
        return self._tensor() is not None

    def check(self, parameter: str) -> None:
        """Raises `MegacompileError`, once, if the tensor was written meanwhile."""
        tensor = self._tensor()
        if tensor is not None and tensor._version != self._version:
            self._version = tensor._version
            raise MegacompileError(f"{self.name} of {parameter}, which is on disk, was changed in a tensor that was read "
                                   "before a step: read it from optimizer.state again after each step, and change that tensor")
