"""Which processes train together: those of torch.distributed's default group, or of a job that torchrun has started."""
from __future__ import annotations

import os
import weakref

import torch
import torch.distributed as dist

from megacompile.compat.distributed import only_default_group
from megacompile.errors import DeviceUnavailableError, MegacompileError
from megacompile.planning.config import StreamConfig
from megacompile.planning.device import compute_device
from megacompile.runtime.hosts import rows_of
from megacompile.runtime.ranks import Ranks, connect


def process_count() -> int:
    """The processes of the default group, or of the job that this process was started in."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1")) if "MASTER_ADDR" in os.environ else 1


def rank_in_job() -> int:
    """This process's number in the default group, or in the job that it was started in."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0")) if process_count() > 1 else 0


def join_group(device_type: str) -> None:
    """Initializes torch.distributed's default group for tensors on the host and on devices of this type, unless the user
    has. What is initialized here ends with the script, after the models that use it: PyTorch warns otherwise."""
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo")
        weakref.finalize(join_group, _leave, os.getpid())  # finalizers that are made later run before it


def _leave(process: int) -> None:
    """Ends the default group, unless this process was forked from the one that made it, or other groups are left: those of
    ranks that have failed may wait for each other."""
    if os.getpid() == process and only_default_group():
        dist.destroy_process_group()


def device_of_rank(config: StreamConfig) -> torch.device:
    """The device of this process: the one that was given, or with several processes the CUDA device of its local rank. Raises
    `DeviceUnavailableError` if the host has more processes than this one sees GPUs: in all of them if the launcher says how
    many there are (`LOCAL_WORLD_SIZE`)."""
    device = compute_device(config.device)
    if device.type != "cuda" or process_count() == 1 or config.distributed is False or ":" in str(config.device or ""):
        return device
    local = int(os.environ.get("LOCAL_RANK", "0"))
    processes = max(local + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if torch.cuda.is_available() and processes > (gpus := torch.cuda.device_count()):
        raise DeviceUnavailableError(
            f"{processes} processes or more were started on this host, but this one sees {gpus} GPU{'s'[:gpus != 1]}: start "
            f"{gpus} (torchrun --nproc-per-node {gpus}), or if each process sees a GPU of its own, give device='cuda:0'")
    return torch.device("cuda", local)


def connected_ranks(config: StreamConfig, device: torch.device) -> Ranks | None:
    """The other ranks that train the model together with this process; None if it trains alone. Initializes torch.distributed
    if the user has not. Raises `MegacompileError` if `distributed` is asked for and there is one process, and what `connect`
    raises."""
    count = process_count()
    if config.distributed is False or count == 1:
        if config.distributed and config.mesh is None:
            raise MegacompileError("distributed=True needs several processes, and there is one: start the script with torchrun "
                                   "--nproc-per-node N, or leave distributed out")
        return None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    join_group(device.type)
    mesh = None if config.mesh is None else rows_of(config.mesh)
    return connect(device, config.stall_timeout, config.peer_copies, mesh)
