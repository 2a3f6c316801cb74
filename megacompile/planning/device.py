"""Which device models are streamed to, and how much of its memory plans may take, for `stream` and `schedule`."""
from __future__ import annotations

import torch

from megacompile.planning.config import StreamConfig
from megacompile.predict.hardware import Hardware
from megacompile.runtime.backends import cuda
from megacompile.sizes import parse_bytes
from megacompile.system.host_memory import available_host_bytes

#: Share of a device's free memory that plans take where no budget was given.
SHARE_OF_FREE = 0.95


def compute_device(device: str | torch.device | None = None, hardware: Hardware | None = None) -> torch.device:
    """The given device; else that of the `hardware`; else CUDA if there is one, or the CPU. CUDA without a number is the first
    device, even if another one is current."""
    default = hardware.device_type if hardware is not None else "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device(device or default)
    return torch.device("cuda", chosen.index or 0) if chosen.type == "cuda" else chosen


def device_budget(config: StreamConfig, free_bytes: int) -> int:
    """Bytes of device memory that plans may take: the given budget, or nearly all that is free."""
    return parse_bytes(config.device_memory) or int(free_bytes * SHARE_OF_FREE)


def free_device_bytes(device: torch.device, hardware: Hardware | None = None) -> int:
    """Bytes of free memory of a device of this machine; or all memory of the `hardware`, if it is given and has such a device.
    For CUDA on a machine without it: the host's available memory."""
    if hardware is not None and hardware.device_type == device.type:
        return hardware.device_memory
    return cuda.free_bytes(device) if device.type == "cuda" and torch.cuda.is_available() else available_host_bytes()
