"""A CPU as one of verl's platforms, for tests. `VERL_USE_EXTERNAL_MODULES=verl_cpu` makes verl import this module, and
`VERL_PLATFORM=cpu` selects it. verl itself has platforms for GPUs alone, but takes others in this way."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _nothing(*_: Any, **__: Any) -> int:
    return 0


def _connect(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """verl names a backend for CPUs and one for the platform's device, which here are the same."""
    _init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)


_init_process_group, dist.init_process_group = dist.init_process_group, _connect


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    #: What verl asks of `torch.cuda` beside a training step.
    device_module: Any = SimpleNamespace(
        empty_cache=_nothing, synchronize=_nothing, max_memory_allocated=_nothing, max_memory_reserved=_nothing,
        memory_allocated=_nothing, memory_reserved=_nothing, mem_get_info=lambda *_: (0, 0), is_available=lambda: True,
        current_device=lambda: "cpu", reset_peak_memory_stats=_nothing, ipc_collect=_nothing, device_count=lambda: 1,
        set_device=_nothing, get_device_name=lambda *_: "CPU")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"  # verl passes it to Tensor.to

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
