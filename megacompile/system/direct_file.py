"""A scratch file of one process, read and written around the page cache by several threads, and mapped besides.

    file = DirectFile(Path("/nvme/state"), size)     preallocated, private, and gone when the process ends
    file.read(slab, start)                           O_DIRECT where the file system has it
    file.mapped[start:stop]                          the same bytes, through the page cache

The file has a name only until it is open: it is created exclusively, then unlinked. So nobody else opens it, no later process
finds it, and its space is free again when the process ends, however it ends. Reads and writes go around the page cache, which
would otherwise fill with optimizer state. The system keeps direct and mapped accesses consistent as long as they do not run at
the same time; `_agrees` tries that out. Offsets, lengths and memory of direct accesses are multiples of `BLOCK`.
"""
from __future__ import annotations

import errno
import mmap
import os
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from megacompile.errors import DiskError
from megacompile.sizes import format_bytes

#: What direct accesses are multiples of: the page, which is at least the block of any drive.
BLOCK = 4096
#: Bytes of one system call. A drive reaches its rate with a few of them at a time.
CHUNK = 1 << 23
#: System calls at a time, of reads and of writes each. They wait for the drive and take no core.
THREADS = 8
#: One call to the system: (file descriptor, buffers, offset) -> bytes.
_Call = Callable[[int, list[memoryview], int], int]


def in_blocks(size: int) -> int:
    """So many bytes, and the padding to whole blocks."""
    return -(-size // BLOCK) * BLOCK


class DirectFile:
    """`size` bytes of zeros in a new file in `folder`, which is made if it does not exist. `direct`: whether accesses go around
    the page cache. `bytes_read`, `bytes_written`: by `read` and `write` so far. `mapped`: uint8 [size].

    Raises `DiskError` if the folder cannot be used or has too little space; then nothing is left there."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, in_blocks(size)
        self.bytes_read = self.bytes_written = 0
        self._counting = threading.Lock()
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._file = self._create()
        try:
            self.direct = self._goes_around_the_cache()
            self._allocate()
            area = mmap.mmap(self._file, self.size)
            if hasattr(mmap, "MADV_DONTFORK"):
                area.madvise(mmap.MADV_DONTFORK)  # the workers of a data loader do not need it
            self.mapped = torch.frombuffer(area, dtype=torch.uint8, count=self.size)
            if self.direct and not self._agrees():
                self.direct = self._set_direct(False)
        except OSError as error:
            os.close(self._file)
            raise _unusable(folder, error) from error
        except BaseException:
            os.close(self._file)
            raise

    # ---------------------------------------------------------------- making it
    def _create(self) -> int:
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            path = self.folder / f"megacompile-state-{os.getpid()}-{secrets.token_hex(8)}"
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _unusable(self.folder, error) from error
        try:
            os.unlink(path)
        except BaseException as error:
            os.close(file)
            if isinstance(error, OSError):
                raise _unusable(self.folder, error) from error
            raise
        return file

    def _allocate(self) -> None:
        room = os.statvfs(self.folder)
        free = room.f_bavail * room.f_frsize
        try:
            if self.size > free:  # asked first: other programs would find the drive full for a moment
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(self._file, 0, self.size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise DiskError(
                f"optimizer state on disk takes {format_bytes(self.size)} and {format_bytes(free)} are free in {self.folder} "
                f"({error.strerror}): name a folder with more space (disk), or keep smaller state "
                "(state_dtype='8bit')") from error

    def _goes_around_the_cache(self) -> bool:
        return hasattr(os, "O_DIRECT") and self._set_direct(True)

    def _set_direct(self, direct: bool) -> bool:
        """Whether the file is direct afterwards. File systems in memory refuse it."""
        import fcntl

        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return direct

    def _agrees(self) -> bool:
        """Whether direct accesses work, and see what was written through the mapping, and the reverse. Leaves zeros."""
        block = mmap.mmap(-1, BLOCK)
        there, seen = memoryview(block), self.mapped[:BLOCK]
        try:
            seen.fill_(1)
            if os.preadv(self._file, [there], 0) != BLOCK or block[:] != b"\1" * BLOCK:
                return False
            block[:] = b"\2" * BLOCK
            return os.pwritev(self._file, [there], 0) == BLOCK and bool((seen == 2).all())
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        finally:
            seen.zero_()

    # ---------------------------------------------------------------- using it
    def read(self, memory: Tensor, start: int) -> None:
        """Fills memory, uint8 [n], with the bytes from `start` on. Raises `OSError`."""
        self._each_chunk("read", os.preadv, memory, start)
        with self._counting:
            self.bytes_read += memory.numel()

    def write(self, memory: Tensor, start: int) -> None:
        """Writes memory, uint8 [n], to the bytes from `start` on. Raises `OSError`; then any part may be written."""
        self._each_chunk("write", os.pwritev, memory, start)
        with self._counting:
            self.bytes_written += memory.numel()

    def _each_chunk(self, way: str, call: _Call, memory: Tensor, start: int) -> None:
        assert memory.numel() % BLOCK == start % BLOCK == memory.data_ptr() % BLOCK == 0, "not in whole blocks"
        assert start + memory.numel() <= self.size, "beyond the end"
        view = memory.numpy().data
        starts = range(0, len(view), CHUNK)
        if len(starts) == 1:
            self._transfer(call, view, start)
            return
        if way not in self._pools:
            self._pools[way] = ThreadPoolExecutor(THREADS, thread_name_prefix=f"megacompile disk {way}")
        under_way: list[Future[None]] = []
        errors: list[BaseException] = []
        for at in starts:
            chunk = call, view[at:at + CHUNK], start + at
            try:
                under_way.append(self._pools[way].submit(self._transfer, *chunk))
            except RuntimeError:  # the interpreter ends, and the lanes finish what they have begun
                try:
                    self._transfer(*chunk)
                except OSError as error:
                    errors.append(error)
        # All have ended when this returns or raises: the memory may be used for something else.
        errors += [found for each in under_way if (found := each.exception()) is not None]
        if errors:
            raise errors[0]

    def _transfer(self, call: _Call, view: memoryview, start: int) -> None:
        done = 0
        while done < len(view):
            count = call(self._file, [view[done:]], start + done)
            if count <= 0:
                raise OSError(errno.EIO, "the file ended")
            done += count

    @property
    def closed(self) -> bool:
        return self._file < 0

    def close(self) -> None:
        """Ends the threads. The space is free once nobody has a part of `mapped` any more."""
        for pool in self._pools.values():
            pool.shutdown()
        self._pools.clear()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _unusable(folder: Path, error: OSError) -> DiskError:
    return DiskError(f"optimizer state cannot be kept in {folder} ({error.strerror}): name a folder on a local drive that this "
                     "process may write to (disk)")
