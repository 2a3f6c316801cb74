"""Signals between GPUs through memory that they all map: a stream writes a number there, and another GPU's stream waits for it.
CUDA's stream memory operations do this without a kernel, which would have to wait until a multiprocessor is free.
"""
from __future__ import annotations

import ctypes
import functools
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from megacompile.errors import LaneError

#: Waits end when the number is this one or a later one (CU_STREAM_WAIT_VALUE_GEQ), and what other devices wrote before it is
#: seen from then on (CU_STREAM_WAIT_VALUE_FLUSH) on devices that have this as an option; on others it is always so.
_AT_LEAST, _FLUSH = 0, 1 << 30
_CAN_FLUSH = 98  # CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES
#: Channels of signals from one rank to another, and the bytes of a signal.
CHANNELS, SIGNAL_BYTES = 8, 4


def signal_bytes(ranks: int) -> int:
    """Bytes of memory for the signals that a rank gets."""
    return CHANNELS * ranks * SIGNAL_BYTES


class StreamSignals:
    """`Peers` (see `peer_copies.py`) over memory of PyTorch's symmetric memory. Signals are in its first bytes, which are zeros
    on every rank before the first signal; data follow at `data_start`.

    State: how many signals were put to each rank, and taken from each, by channel."""

    def __init__(self, memory: Tensor, handle: Any, rank: int, size: int) -> None:
        self.rank, self.size, self._handle, self._device = rank, size, handle, memory.device
        self.data_start = 256 * -(-signal_bytes(size) // 256)
        self._put: Counter[tuple[int, int]] = Counter()
        self._taken: Counter[tuple[int, int]] = Counter()
        self._memory = memory
        self._how = _AT_LEAST | (_FLUSH if _attribute(_CAN_FLUSH, memory.get_device()) else 0)

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int) -> Tensor:
        buffer: Tensor = self._handle.get_buffer(rank, sizes, dtype, storage_offset + self.data_start // dtype.itemsize)
        return buffer

    def put_signal(self, dst_rank: int, channel: int) -> None:
        self._put[dst_rank, channel] += 1
        self._call("cuStreamWriteValue32_v2", self._address(dst_rank, channel, self.rank), self._put[dst_rank, channel], 0)

    def wait_signal(self, src_rank: int, channel: int) -> None:
        self._taken[src_rank, channel] += 1
        self._call("cuStreamWaitValue32_v2", self._address(self.rank, channel, src_rank), self._taken[src_rank, channel],
                   self._how)

    def _address(self, rank: int, channel: int, source: int) -> int:
        return int(self._handle.buffer_ptrs[rank]) + SIGNAL_BYTES * (channel * self.size + source)

    def _call(self, name: str, address: int, number: int, flags: int) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        # The comparison wraps around, so numbers may.
        code = getattr(_driver(), name)(ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint32(number & 0xFFFFFFFF),
                                        ctypes.c_uint(flags))
        if code:
            raise LaneError(f"{name} failed with CUDA error {code}: stream with peer_copies=False, which exchanges by NCCL")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _attribute(number: int, device: int) -> int:
    found = ctypes.c_int()
    code = _driver().cuDeviceGetAttribute(ctypes.byref(found), ctypes.c_int(number), ctypes.c_int(device))
    return 0 if code else found.value
