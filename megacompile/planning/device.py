"""The device that models are streamed to, and the memory of it that plans may take, for `stream` and `schedule`."""
from __future__ import annotations

import os
import weakref

import torch
import torch.distributed as dist

from megacompile.compat.distributed import only_default_group
from megacompile.errors import DeviceUnavailableError, MegacompileError
from megacompile.planning.config import StreamConfig
from megacompile.predict.hardware import Hardware
from megacompile.runtime.backends import cuda
from megacompile.runtime.hosts import rows_of, sequence_ranks_of
from megacompile.runtime.ranks import Ranks, connect
from megacompile.sizes import parse_bytes
from megacompile.system.host_memory import available_host_bytes

#: Share of a device's free memory that plans take where no budget was given.
SHARE_OF_FREE = 0.95


def compute_device(device: str | torch.device | None = None, hardware: Hardware | None = None) -> torch.device:
    """The given device; else the device of the `hardware`; else CUDA if available, or the CPU. CUDA without a number means the
    first device, even if another one is current."""
    default = hardware.device_type if hardware is not None else "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device(device or default)
    return torch.device("cuda", chosen.index or 0) if chosen.type == "cuda" else chosen


def device_budget(config: StreamConfig, free_bytes: int) -> int:
    """Bytes of device memory that plans may take: the given budget, or nearly all free memory."""
    return parse_bytes(config.device_memory) or int(free_bytes * SHARE_OF_FREE)


def free_device_bytes(device: torch.device, hardware: Hardware | None = None) -> int:
    """Bytes of free memory of a device of this machine, or all memory of the `hardware`, if it is given and has such a device.
    For CUDA on a machine without it: the host's available memory."""
    if hardware is not None and hardware.device_type == device.type:
        return hardware.device_memory
    return cuda.free_bytes(device) if device.type == "cuda" and torch.cuda.is_available() else available_host_bytes()


# --------------------
# The processes that train together: those of torch.distributed's default group, or of a job that torchrun has started.
def process_count() -> int:
    """The number of processes in the default group, or in the job that started this process."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1")) if "MASTER_ADDR" in os.environ else 1


def rank_in_job() -> int:
    """This process's number in the default group, or in the job that started it."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0")) if process_count() > 1 else 0


def join_group(device_type: str) -> None:
    """Initializes torch.distributed's default group for tensors on the host and on devices of this type, unless the user has. A
    group that is initialized here ends with the script, after the models that use it. Otherwise PyTorch warns."""
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo")
        weakref.finalize(join_group, _leave, os.getpid())  # finalizers that are made later run before it


def _leave(process: int) -> None:
    """Ends the default group, unless this process was forked from the one that made it, or other groups remain: groups of ranks
    that have failed may wait for each other."""
    if os.getpid() == process and only_default_group():
        dist.destroy_process_group()


def device_of_rank(config: StreamConfig) -> torch.device:
    """The device of this process: the given one, or with several processes the CUDA device of its local rank. Raises
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
    sequence_ranks = 1 if config.mesh is None else sequence_ranks_of(config.mesh)
    return connect(device, config.stall_timeout, config.peer_copies, mesh, sequence_ranks)
