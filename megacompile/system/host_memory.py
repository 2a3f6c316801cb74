"""Memory of the host: mappings for tiles, what is available, what is given back."""
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
    """`size` bytes of page-aligned, zeroed host memory as uint8; huge pages where the system gives them. Not touched yet.

    A forked process has it only if `inherited`: of what both have, every page that is written afterwards is copied, so
    that the workers of a data loader would double what training writes."""
    try:
        area = mmap.mmap(-1, max(PAGE, -(-size // PAGE) * PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise InsufficientMemoryError(
            f"the system gives no {size} bytes of host memory ({error.strerror}), and {available_host_bytes()} are available: "
            "use a smaller model, or raise the limit (ulimit -v, vm.overcommit_memory)") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)  # pinning and page faults cost per page
    if not inherited and hasattr(mmap, "MADV_DONTFORK"):
        area.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(area, dtype=torch.uint8, count=size)


def give_back_freed_memory() -> None:
    """Hands to the system what was freed and what the C library keeps: of tensors below 32 MiB, all."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # glibc
        library.malloc_trim(0)


def available_host_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this process may still take: what the system has, less where a control group (a container) has less."""
    lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    return max(0, min([available, *group_rooms(proc, cgroups)]))
