"""Host memory: mappings for tiles, also shared by the processes of several ranks; available bytes."""
from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megacompile.errors import InsufficientMemoryError, RankError

# -------------------- Memory and processor time that control groups (a container's limits) leave this process
_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def _groups(controller: str, proc: Path, cgroups: Path) -> Iterator[tuple[int, Path]]:
    """(version, folder) of each group that contains this process and may have this controller's limits, innermost first."""
    try:
        memberships = (proc / "self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:  # a kernel without control groups
        return
    for _, controllers, path in (line.split(":", 2) for line in memberships):
        if controllers == "":
            version, root = 2, cgroups
        elif controller in controllers.split(","):
            version, root = 1, cgroups / controller
        else:
            continue
        inside = root / path.lstrip("/")
        for group in (inside, *inside.parents):
            if not group.is_relative_to(root):
                break
            yield version, group


def group_rooms(proc: Path = _PROC, cgroups: Path = _GROUPS) -> Iterator[int]:
    """Bytes that each limited group has left. Cached file pages can be reclaimed, so they count as free."""
    return (limit - used for limit, used in _memory(proc, cgroups))


def host_bytes(proc: Path = _PROC, cgroups: Path = _GROUPS) -> int:
    """Bytes that this process could have if no other process used any: the machine's memory, or its groups' limits."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _ in _memory(proc, cgroups))])


def _memory(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) of each limit, in bytes. Above `memory.high` a group is throttled, not killed; for training that is no
    better, so it counts as a limit."""
    for version, group in _groups("memory", proc, cgroups):
        limits, usage, cached = (("memory.max", "memory.high"), "memory.current", "inactive_file") if version == 2 else (
            ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
        try:  # the root group has no limit, and a container may see its own group as the root
            used = int((group / usage).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except OSError:
            continue
        for limit in limits:
            try:
                most = (group / limit).read_text(encoding="ascii").strip()
            except OSError:
                continue
            if most != "max":
                yield int(most), used - int(stat.get(cached, 0))


@functools.cache
def cores(proc: Path = _PROC, cgroups: Path = _GROUPS) -> int:
    """The number of processors that this process may use at a time. A container with the time of two processors on a machine of
    64 may run on any of the 64. There 64 threads would use up that time at once, then wait for the rest of each period."""
    return max(1, min([len(os.sched_getaffinity(0)), *_cpu_quotas(proc, cgroups)]))


def share_of_cores(processes: int, proc: Path = _PROC, cgroups: Path = _GROUPS) -> int:
    """The number of processors that each of several equal processes on this machine should use. A process that may only run on
    some processors, such as those near its GPU, uses no more than these."""
    everything = min([os.cpu_count() or 1, *_cpu_quotas(proc, cgroups)])
    return max(1, min(cores(proc, cgroups), everything // processes))


def _cpu_quotas(proc: Path, cgroups: Path) -> Iterator[int]:
    """The processors whose time each limited group may use."""
    for version, group in _groups("cpu", proc, cgroups):
        try:
            if version == 2:
                quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
            else:
                quota, period = ((group / f"cpu.cfs_{each}_us").read_text(encoding="ascii").strip()
                                 for each in ("quota", "period"))
        except OSError:
            continue
        if quota not in ("max", "-1"):
            yield math.ceil(int(quota) / int(period))


# -------------------- Host memory: mappings for tiles, available bytes, giving freed memory back
PAGE = 4096


def host_memory(size: int, inherited: bool = False) -> Tensor:
    """`size` bytes of page-aligned, zeroed host memory, uint8 [size]; huge pages where the system has them. The pages are not
    touched yet. Raises `InsufficientMemoryError`.

    A forked process has this memory only if `inherited`. Pages that both processes have are copied when one writes them: the
    workers of a data loader would double the memory that training writes."""
    try:
        area = mmap.mmap(-1, max(PAGE, -(-size // PAGE) * PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise InsufficientMemoryError(
            f"the system cannot provide {size} bytes of host memory ({error.strerror}); {available_host_bytes()} are "
            "available: use a smaller model, or raise the limit (ulimit -v, vm.overcommit_memory)") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)  # pinning and page faults cost per page
    if not inherited and hasattr(mmap, "MADV_DONTFORK"):
        area.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(area, dtype=torch.uint8, count=size)


def give_back_freed_memory() -> None:
    """Returns the freed memory that the C library keeps to the system: that of all freed tensors below 32 MiB."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # glibc
        library.malloc_trim(0)


def resident_bytes() -> int:
    """Host memory that this process takes now: its resident set, including Python, libraries, and shared memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE


def available_host_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still take: what the system has available, or a control group (a container) if it has
    less."""
    lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    return max(0, min([available, *group_rooms(proc, cgroups)]))


# --------------------
# Host memory that the processes of several ranks map together. It has no name, belongs to the user, and ends with them.
#
# One process makes an anonymous file (`memfd_create`); the others open it through `/proc`. A container's small `/dev/shm` is no
# limit.
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
