"""Which device models are streamed to, and how much of its memory plans may take: `stream` and `schedule` ask here."""
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
    """The device that was asked for, or else that of the `hardware`, or else CUDA where there is any. CUDA without a number is
    the first device, whichever is current."""
    default = hardware.device_type if hardware is not None else "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device(device or default)
    return torch.device("cuda", chosen.index or 0) if chosen.type == "cuda" else chosen


def device_budget(config: StreamConfig, free_bytes: int) -> int:
    """Bytes of device memory that plans may take: as many as were given, or nearly all that are free."""
    return parse_bytes(config.device_memory) or int(free_bytes * SHARE_OF_FREE)


def free_device_bytes(device: torch.device, hardware: Hardware | None = None) -> int:
    """Free memory of a device of this machine; of the `hardware`, where this is given and has such a device, all that there is.
    Without CUDA, a schedule for it has the host's."""
    if hardware is not None and hardware.device_type == device.type:
        return hardware.device_memory
    return cuda.free_bytes(device) if device.type == "cuda" and torch.cuda.is_available() else available_host_bytes()
