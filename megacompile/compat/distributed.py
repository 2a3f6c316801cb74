"""Collectives whose names differ between the versions of PyTorch that we support, memory that several GPUs map, and the end of
groups."""
from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric  # memory that the GPUs of a host map, and signals between them
from torch import Tensor

#: PyTorch 2.13 renamed these, and warns about the old names.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(whole: Tensor, own: Tensor, group: dist.ProcessGroup, wait: bool) -> Any:
    """Fills `whole`, [ranks * n], with the tensors [n] of all ranks. Returns the work; with `wait`, waits for it instead."""
    return _gather(whole, own, group=group, async_op=not wait)


def reduce_scatter(own: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
    """Fills `own`, [n], with this rank's part of the sum of all ranks' `whole`, [ranks * n]. `own` may be a part of `whole`."""
    _reduce_scatter(own, whole, group=group)


def end(group: dist.ProcessGroup) -> None:
    """Ends a process group, unless it has ended already: `destroy_process_group()` of the default group ends all others."""
    if group in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)


def only_default_group() -> bool:
    """True if the default group is the only process group."""
    return list(dist.distributed_c10d._world.pg_map) == [dist.group.WORLD]


def never_end(group_or_work: Any) -> None:
    """Keeps a process group, or the work of one, until the process has ended. A group's destructor waits for its collectives,
    and those of gloo cannot be aborted. So a process could not end while another one is stopped."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group_or_work))


def memory_of_peers(size: int, device: torch.device, group: dist.ProcessGroup) -> tuple[Tensor, Any]:
    """Zeros, uint8 [size] on this rank's device, and their handle, through which every rank reaches the same memory of the
    others. All ranks of the group call this. Raises `RuntimeError` if the devices cannot reach each other's memory."""
    memory = symmetric.empty(size, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(memory, group)
    memory.zero_()
    torch.cuda.synchronize(device)
    return memory, handle
