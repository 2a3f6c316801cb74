"""Host memory: mappings for tiles, available bytes, giving freed memory back."""
from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import torch
from torch import Tensor

from megacompile.errors import InsufficientMemoryError
from megacompile.system.control_groups import group_rooms

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
    """Gives back to the system the freed memory that the C library keeps: that of all freed tensors below 32 MiB."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # glibc
        library.malloc_trim(0)


def resident_bytes() -> int:
    """Host memory that this process takes now: its resident set, with Python, libraries, and memory that it shares."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE


def available_host_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still take: what the system has available, or a control group (a container) if it has
    less."""
    lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    return max(0, min([available, *group_rooms(proc, cgroups)]))
