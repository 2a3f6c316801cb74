"""Memory and processor time that control groups (a container's limits) leave this process."""
from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator
from pathlib import Path

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
    """How many processors this process may use at a time. A container that has the time of two processors on a machine of 64
    may run on any of the 64: 64 threads would use up that time at once, then wait for the rest of each period."""
    return max(1, min([len(os.sched_getaffinity(0)), *_cpu_quotas(proc, cgroups)]))


def share_of_cores(processes: int, proc: Path = _PROC, cgroups: Path = _GROUPS) -> int:
    """How many processors each of several equal processes on this machine should use. A process that may only run on some
    processors, such as those near its GPU, uses no more than these."""
    everything = min([os.cpu_count() or 1, *_cpu_quotas(proc, cgroups)])
    return max(1, min(cores(proc, cgroups), everything // processes))


def _cpu_quotas(proc: Path, cgroups: Path) -> Iterator[int]:
    """The processors whose time each limited group has."""
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
