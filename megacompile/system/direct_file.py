"""A scratch file that processes of one host read and write around the page cache, with several threads.

    file = DirectFile(Path("/nvme/state"), size)     preallocated, private, and gone when the last process closes it
    file.read(slab, start)                           whole blocks; O_DIRECT where the file system has it
    file.read_bytes(values, start)                   any bytes, through a block of memory
    DirectFile.of(file.folder, file.address)         the same file, opened by another process of this user

The file has a name only until it is open: it is created exclusively, then unlinked. So no other user opens it, no later process
finds it, and its space is free again when its processes end, however they end. Reads and writes go around the page cache, which
would otherwise fill with optimizer state. The file is never mapped: a drive that fails would end the process, where a call to
the system returns an error. Offsets, lengths and memory of direct accesses are multiples of `BLOCK`.
"""
from __future__ import annotations

import errno
import os
import secrets
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

from torch import Tensor

from megacompile.errors import DiskError, RankError
from megacompile.sizes import format_bytes
from megacompile.system.host_memory import host_memory

#: Direct accesses are multiples of this size: the page, which is at least the block of any drive.
BLOCK = 4096
#: Bytes of one system call. A drive reaches its rate with a few of them at a time.
CHUNK = 1 << 23
#: System calls at a time, of reads and of writes each. They wait for the drive and take no core.
THREADS = 8
#: One call to the system: (file descriptor, buffers, offset) -> bytes.
_Call = Callable[[int, list[memoryview], int], int]
#: Process, file descriptor, bytes, and whether accesses go around the page cache.
Address = tuple[int, int, int, bool]


def in_blocks(size: int) -> int:
    """The number of bytes, rounded up to whole blocks."""
    return -(-size // BLOCK) * BLOCK


class DirectFile:
    """`size` bytes of zeros in a new file in `folder`, which is made if it does not exist. `direct`: accesses bypass the page
    cache. `bytes_read`, `bytes_written`: whole blocks that `read` and `write` have transferred so far. Raises `DiskError` if
    the folder cannot be used or has too little space; then nothing is left there."""

    def __init__(self, folder: Path, size: int) -> None:
        self._begin(folder, in_blocks(size), self._create(folder))
        try:
            self.direct = self._goes_around_the_cache()
            self._allocate()
            if self.direct and not self._transfers_directly():
                self.direct = self._set_direct(False)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise _unusable(folder, error) from error
            raise

    @classmethod
    def of(cls, folder: Path, address: Address) -> Self:
        """The file of another process, which must have it open. Raises `RankError` if it cannot be opened."""
        process, number, size, direct = address
        try:
            opened = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RankError(f"the optimizer state of process {process} cannot be opened ({error.strerror}): run all ranks of a "
                            "host as the same user and in the same container") from error
        file = cls.__new__(cls)
        file._begin(folder, size, opened)
        file.direct = file._set_direct(direct) if direct else False
        return file

    def _begin(self, folder: Path, size: int, file: int) -> None:
        self.folder, self.size, self._file, self.direct = folder, size, file, False
        self.bytes_read = self.bytes_written = 0
        self._counting, self._editing = threading.Lock(), threading.Lock()
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._close = weakref.finalize(self, os.close, file)
        self._close.atexit = False  # lanes finish what they have begun while the interpreter ends

    @property
    def address(self) -> Address:
        """The address by which other processes open the file."""
        return os.getpid(), self._file, self.size, self.direct

    # ---------------------------------------------------------------- making it
    @staticmethod
    def _create(folder: Path) -> int:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            path = folder / f"megacompile-state-{os.getpid()}-{secrets.token_hex(8)}"
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _unusable(folder, error) from error
        try:
            os.unlink(path)
        except BaseException as error:
            os.close(file)
            if isinstance(error, OSError):
                raise _unusable(folder, error) from error
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
        """Makes accesses direct. Returns False if the file system refuses it, as those in memory do."""
        import fcntl

        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return direct

    def _transfers_directly(self) -> bool:
        """True if direct accesses of a block work. Leaves zeros."""
        there = host_memory(BLOCK)
        try:
            view = there.numpy().data
            return os.pwritev(self._file, [view], 0) == os.preadv(self._file, [view], 0) == BLOCK
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False

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

    def read_bytes(self, memory: Tensor, start: int) -> None:
        """Like `read`, for any number of bytes from any position, into memory that need not be aligned. Not counted."""
        self._through_blocks(memory, start, writes=False)

    def write_bytes(self, memory: Tensor, start: int) -> None:
        """Like `write`, for any bytes. The other bytes of their blocks stay. No other process may write those at the same
        time."""
        with self._editing:
            self._through_blocks(memory, start, writes=True)

    def _through_blocks(self, memory: Tensor, start: int, writes: bool) -> None:
        """Copies through one buffer. After the first pass the buffer begins where the last pass ended. A write reads only the
        blocks at its ends, which it changes in part."""
        at, stop = start, start + memory.numel()
        buffer = host_memory(min(THREADS * CHUNK, in_blocks(stop) - start // BLOCK * BLOCK))
        while at < stop:
            first = at // BLOCK * BLOCK
            end = min(stop, first + buffer.numel())
            blocks, part = buffer[:in_blocks(end - first)], memory[at - start:end - start]
            inside = slice(at - first, end - first)
            if not writes:
                self._each_chunk("read", os.preadv, blocks, first)
                part.copy_(blocks[inside])
            else:
                edges = ({0} if inside.start else set()) | ({blocks.numel() - BLOCK} if inside.stop % BLOCK else set())
                for edge in edges:
                    self._each_chunk("read", os.preadv, blocks[edge:edge + BLOCK], first + edge)
                blocks[inside] = part
                self._each_chunk("write", os.pwritev, blocks, first)
            at = end

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
        """True if the file was closed."""
        return not self._close.alive

    def stop_threads(self) -> None:
        """Ends the threads. The file stays, and the next access starts them again."""
        for pool in self._pools.values():
            pool.shutdown()
        self._pools.clear()

    def close(self) -> None:
        """Closes the file. Its space is free once no process has it open. A file that is forgotten is closed too."""
        self.stop_threads()
        self._close()
        self._file = -1  # the number may soon be another file's


def _unusable(folder: Path, error: OSError) -> DiskError:
    return DiskError(f"optimizer state cannot be kept in {folder} ({error.strerror}): name a folder on a local drive that this "
                     "process may write to (disk)")
