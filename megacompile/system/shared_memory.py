"""Host memory that the processes of several ranks map together. It has no name, belongs to the user, and ends with them.

One process makes an anonymous file (`memfd_create`); the others open it through `/proc`. A container's small `/dev/shm` is no
limit.
"""
from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

from megacompile.errors import InsufficientMemoryError, RankError
from megacompile.system.host_memory import PAGE

#: Process and file descriptor of the process that made the memory.
Address = tuple[int, int]


class SharedMemory:
    """Named pieces of one shared file. `sizes`: their bytes by name, the same in every process. The system frees the pages of
    all pieces together: once no process has this object, or has mapped a piece."""

    def __init__(self, sizes: Mapping[str, int], address: Address | None = None) -> None:
        """Makes the memory, zeros, or opens that of another process. Raises `InsufficientMemoryError`, and `RankError` if the
        other process has ended."""
        self._places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, size in sizes.items():
            self._places[name] = end, size
            end += max(PAGE, -(-size // PAGE) * PAGE)
        if address is None:
            self._file = os.memfd_create("megacompile", os.MFD_CLOEXEC)
            self._close = weakref.finalize(self, os.close, self._file)
            os.ftruncate(self._file, end)
            return
        try:
            self._file = os.open(f"/proc/{address[0]}/fd/{address[1]}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RankError(f"the memory of process {address[0]} cannot be opened ({error.strerror}): run all ranks of a host "
                            "as the same user and in the same container") from error
        self._close = weakref.finalize(self, os.close, self._file)

    @property
    def address(self) -> Address:
        return os.getpid(), self._file

    def piece(self, name: str) -> Tensor:
        """uint8 [size]. Pages are taken when they are first touched."""
        start, size = self._places[name]
        try:
            area = mmap.mmap(self._file, max(PAGE, -(-size // PAGE) * PAGE), flags=mmap.MAP_SHARED, offset=start)
        except OSError as error:
            raise InsufficientMemoryError(f"the system cannot provide {size} bytes of shared host memory ({error.strerror}): "
                                          "use a smaller model, or raise the limit (ulimit -v)") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            area.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(area, dtype=torch.uint8, count=size)

    def close(self) -> None:
        """Closes the file. Pieces that are mapped stay."""
        self._close()
        self._file = -1
