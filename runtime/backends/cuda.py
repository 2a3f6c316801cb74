"""CUDA through CuPy: a stream per lane, events, pinned host memory, asynchronous copies.

PyTorch computes on the compute lane's stream through `torch.cuda.ExternalStream`. Tensors that never cross the link come from
PyTorch's caching allocator. Its segments must be expandable, or recomputation fragments it.
"""
from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megacompile.compat.core import clear_cublas_workspaces, foreach_norm, set_allocator_settings, sleep_on_device
from megacompile.errors import DeviceUnavailableError, InsufficientMemoryError, LaneError
from megacompile.ir.program import Lane
from megacompile.runtime.backends.lanes import CudaTimestamps, Timestamps
from megacompile.runtime.optimizer import device_update
from megacompile.runtime.optimizer.host_update import Moments
from megacompile.runtime.optimizer.rule import Rule, Segment


def expandable_segments() -> None:
    """Selects expandable segments, unless the user has configured the allocator. Call it before the first CUDA allocation."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ and "PYTORCH_ALLOC_CONF" not in os.environ:
        set_allocator_settings("expandable_segments:True")


def free_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device that this process could allocate now: free bytes, and those that PyTorch's allocator keeps
    unused."""
    gc.collect()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


#: Lanes whose work is queued on the device. The lane cpu also has a stream, for copies that it waits for.
_QUEUES = (Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.COLLECTIVE)
#: The priority of a stream whose kernels start before those of others; CUDA takes the highest one that the device has.
_FIRST = -5
#: Sets of streams that no backend uses, by device. Streams are never destroyed: when a tensor is freed, PyTorch's allocator
#: records an event on each stream that used the tensor, and aborts the process if that stream does not exist any more.
_idle_streams: dict[int, list[dict[Lane, Any]]] = {}


def _streams(cupy: Any, index: int) -> dict[Lane, Any]:
    if idle := _idle_streams.get(index):
        return idle.pop()
    with cupy.cuda.Device(index):
        # The others' devices wait for exchanges, whose few kernels (the sums) are short: they go first.
        return {lane: cupy.cuda.Stream(non_blocking=True, priority=_FIRST if lane == Lane.COLLECTIVE else 0)
                for lane in (*_QUEUES, Lane.CPU)}


def cupy_for_cuda() -> Any:
    """The module `cupy`. Raises `DeviceUnavailableError` if torch finds no CUDA device, or if CuPy is not installed."""
    if not torch.cuda.is_available():
        raise DeviceUnavailableError(
            "device='cuda' was asked for, but torch finds no CUDA device: use device='cpu', or install torch for CUDA")
    try:
        import cupy
    except ImportError as error:
        raise DeviceUnavailableError(
            "device='cuda' needs CuPy: pip install cupy-cuda13x (CUDA 13) or cupy-cuda12x") from error
    return cupy


class CudaBackend:
    """One CUDA device. Each lane except pack has a stream. The lanes cpu and pack work on the host."""

    def __init__(self, index: int = 0) -> None:
        self.cupy, self.index = cupy_for_cuda(), index
        self.device = torch.device("cuda", index)
        expandable_segments()
        self.streams = _streams(self.cupy, index)
        self.compute, self.collective = (torch.cuda.ExternalStream(self.streams[lane].ptr, device=self.device)
                                         for lane in (Lane.COMPUTE, Lane.COLLECTIVE))
        self._pinned: dict[int, int] = {}
        weakref.finalize(self, _idle_streams.setdefault(index, []).append, self.streams)

    @contextlib.contextmanager
    def lane(self, lane: Lane) -> Iterator[None]:
        # PyTorch's operations of the lane collective are those of NCCL, which wait for the current stream.
        stream = self.collective if lane == Lane.COLLECTIVE else self.compute
        with (self.cupy.cuda.Device(self.index), torch.cuda.device(self.device), torch.no_grad(), torch.cuda.stream(stream)):
            yield

    def memory(self, size: int) -> Tensor:
        """Memory for a slot. PyTorch's stream bookkeeping ignores it, since other streams write it in the order of the
        program."""
        with torch.cuda.device(self.device), torch.cuda.stream(self.compute):
            memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.compute.synchronize()  # the allocator may hand out memory whose last use is still queued on this stream
        return memory

    def pin(self, host: Tensor) -> None:
        address, size = host.data_ptr(), host.numel() * host.element_size()
        if address in self._pinned:
            return
        try:
            self.cupy.cuda.runtime.hostRegister(address, size, 0)
        except self.cupy.cuda.runtime.CUDARuntimeError as error:
            raise InsufficientMemoryError(
                f"{size / 2**30:.2f} GiB of host memory could not be pinned ({error}): "
                "raise the limit (ulimit -l), or give a smaller pinned_memory") from error
        self._pinned[address] = size

    def unpin(self, host: Tensor) -> None:
        if self._pinned.pop(host.data_ptr(), None) is not None:
            self.cupy.cuda.runtime.hostUnregister(host.data_ptr())

    def copy(self, destination: Tensor, source: Tensor, lane: Lane) -> None:
        assert destination.numel() == source.numel() and destination.dtype == source.dtype == torch.uint8
        runtime = self.cupy.cuda.runtime
        kind = runtime.memcpyHostToDevice if destination.is_cuda else runtime.memcpyDeviceToHost
        runtime.memcpyAsync(destination.data_ptr(), source.data_ptr(), source.numel(), kind, self.streams[lane].ptr)
        if lane not in _QUEUES:
            self.streams[lane].synchronize()

    def norms(self, views: Sequence[Tensor], out: Tensor) -> None:
        torch.stack(foreach_norm(list(views), 2, dtype=torch.float32), out=out)

    def update(self, rule: Rule, weights: Tensor, remainder: Tensor | None, gradient: Tensor,
               segments: Sequence[tuple[Segment, Moments]], gradient_scale: float,
               judged: tuple[Tensor, Tensor] | None = None, lane: Lane = Lane.COMPUTE) -> None:
        device_update.update(self.cupy, self.streams[lane], rule, weights, remainder, gradient, segments, gradient_scale,
                             judged)

    def issuing(self, lane: Lane) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(torch.cuda.ExternalStream(self.streams[lane].ptr, device=self.device))

    def used_by(self, lane: Lane, memory: Sequence[Tensor]) -> None:
        stream = torch.cuda.ExternalStream(self.streams[lane].ptr, device=self.device)
        for part in memory:
            part.record_stream(stream)

    def record(self, lane: Lane) -> Any:
        if lane not in _QUEUES:
            return None
        event = self.cupy.cuda.Event(block=True, disable_timing=True)
        event.record(self.streams[lane])
        return event

    def wait(self, lane: Lane, event: Any) -> None:
        if event is None:
            return
        if lane in _QUEUES:
            self.streams[lane].wait_event(event)
        else:
            event.synchronize()

    def busy(self, lane: Lane) -> bool:
        # For good: a new thread's device is the first one, and going back to it would take memory there.
        self.cupy.cuda.runtime.setDevice(self.index)
        return lane in _QUEUES and not self.streams[lane].done

    def timestamps(self) -> Timestamps:
        with self.cupy.cuda.Device(self.index):
            return CudaTimestamps(self.cupy, self.streams)

    def synchronize(self) -> None:
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:  # a kernel's error is raised here, and by every call from now on
            raise LaneError(f"{self.device} has failed and cannot be used in this process any more: start a new one and load "
                            f"the last checkpoint ({str(error).splitlines()[0]})") from error

    def delay(self, lane: Lane, seconds: float) -> None:
        if lane not in _QUEUES:
            import time
            time.sleep(seconds)
            return
        stream = torch.cuda.ExternalStream(self.streams[lane].ptr, device=self.device)
        with torch.cuda.stream(stream):
            sleep_on_device(int(seconds * 1.5e9))  # cycles, at about the clock of a current device

    def enter(self, tensors: list[Tensor]) -> None:
        self.compute.wait_stream(torch.cuda.current_stream(self.device))
        for tensor in tensors:
            if tensor.is_cuda:
                # The caller may free it as soon as we return; without this, its memory is reused while compute still
                # reads it (the paper's own code misses one of these calls, and its loss becomes NaN).
                tensor.record_stream(self.compute)

    def exit(self, tensors: list[Tensor], event: Any = None) -> None:
        stream = torch.cuda.current_stream(self.device)
        if event is None:
            stream.wait_stream(self.compute)
        else:
            with torch.cuda.device(self.device):  # the default stream is that of the current device
                self.cupy.cuda.runtime.streamWaitEvent(stream.cuda_stream, event.ptr)
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(stream)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_reserved(self.device)

    def trim(self) -> None:
        # A cuBLAS workspace stays where the first product allocated it, between slots and activations of that plan. Those of
        # the next plan would be placed around it, and the gaps count as reserved.
        clear_cublas_workspaces()
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        return free_bytes(self.device)
