"""Exchanges between ranks: weights and gradients between the ranks of a copy of the model, sums of gradients between copies.

Three groups, since two lanes use them at the same time: the lane `collective` exchanges weights, gradients and norms on the
device with the ranks of this copy, and sums with the ranks of other copies that have the same shard (NCCL, or gloo on CPUs);
the lane `cpu` exchanges norms in host memory with the ranks of this copy. A group of one rank is None, and is not used. The
ranks of a copy are on one host, or on several, where exchanges cross the network.

All copies must come to the same bits, or they would drift apart. Sums over copies, and sums of norms where there are several,
therefore do not depend on the order in which a library adds.
"""
from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megacompile.compat.distributed import all_gather, memory_of_peers, reduce_scatter
from megacompile.errors import LaneError, UnsupportedError
from megacompile.runtime.hosts import Hosts

# --------------------
# Exchanges between the GPUs of a host by their copy engines, which leave the multiprocessors to the layers.
#
# NCCL's kernels hold some multiprocessors. A matrix product that has a block for each of them must then wait for those blocks,
# so that compute stands still for about as long as an exchange takes. Copies from one GPU's memory to another's need no
# multiprocessor.
#
# Each rank has a `stage`, from which the others read its shard in a gather, and an `inbox`, into which they write their parts
# of a sum. Both have two halves, so that one chunk is copied while the one before it is read:
#
#     gather           stage own chunk -> signal STAGED -> copy the others' chunks from their stages -> signal READ
#     reduce_scatter   copy each rank's part of my chunk into its inbox -> signal WRITTEN -> add up the inbox -> signal ADDED
#
# A half is used again once READ or ADDED has come from every other rank. Signals are values in memory that all GPUs map; the
# lane's stream waits for them, and the host does not.
#: Bytes of a half of the stage, and of a half of the inbox.
HALF_BYTES = 1 << 26
#: Bytes of `Peers`' memory: both halves of both.
HALVES_BYTES = 4 * HALF_BYTES
#: Alignment of the parts of a chunk, in elements.
_ALIGNED = 64
_STAGED, _READ, _WRITTEN, _ADDED = range(0, 8, 2)  # channels of signals: one for each half


class Peers(Protocol):
    """Memory of the same size on every rank, and signals between ranks, in the order of the current stream. A wait takes the
    signal. Putting a signal again first waits until the previous one was taken."""

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int) -> Tensor: ...

    def put_signal(self, dst_rank: int, channel: int) -> None: ...

    def wait_signal(self, src_rank: int, channel: int) -> None: ...


class PeerCopies:
    """The exchanges of one rank. Every rank makes the same exchanges, in the same order. State: how many chunks were gathered,
    and how many were added up."""

    def __init__(self, peers: Peers, rank: int, size: int, half_bytes: int = HALF_BYTES) -> None:
        self.rank, self.size = rank, size
        self._peers, self._half = peers, half_bytes
        self._others = [(rank + step) % size for step in range(1, size)]  # not all read from the same rank at a time
        self._gathered = self._added = 0

    def gather(self, whole: Tensor, shard: Tensor) -> None:
        """Fills `whole`, uint8 [size * n], with the shards of all ranks, uint8 [n] each. `shard` may be this rank's part of
        `whole`."""
        parts = whole.view(self.size, -1)
        if parts[self.rank].data_ptr() != shard.data_ptr():
            parts[self.rank].copy_(shard)
        for start in range(0, len(shard), self._half):
            chunk = shard[start:start + self._half]
            half, used = self._gathered % 2, self._gathered >= 2
            self._gathered += 1
            self._wait_for_all(_READ + half, used)
            self._stage(self.rank, half, len(chunk)).copy_(chunk)
            for other in self._others:
                self._peers.put_signal(other, _STAGED + half)
            for other in self._others:
                self._peers.wait_signal(other, _STAGED + half)
                parts[other, start:start + len(chunk)].copy_(self._stage(other, half, len(chunk)))
                self._peers.put_signal(other, _READ + half)

    def reduce_scatter(self, flat: Tensor) -> None:
        """Adds up `flat`, fp32 [size * n], over the ranks. Afterwards this rank's n elements hold the sums: its own values,
        then those of the other ranks in rank order."""
        parts = flat.view(self.size, -1)
        own = parts[self.rank]
        room = self._half // (4 * (self.size - 1)) // _ALIGNED * _ALIGNED
        for start in range(0, len(own), room):
            chunk = own[start:start + room]
            half, used = self._added % 2, self._added >= 2
            self._added += 1
            for other in self._others:
                if used:
                    self._peers.wait_signal(other, _ADDED + half)
                self._inbox(other, half, self.rank, room)[:len(chunk)].copy_(parts[other, start:start + len(chunk)])
                self._peers.put_signal(other, _WRITTEN + half)
            for other in sorted(self._others):
                self._peers.wait_signal(other, _WRITTEN + half)
                chunk.add_(self._inbox(self.rank, half, other, room)[:len(chunk)])
                self._peers.put_signal(other, _ADDED + half)

    def _wait_for_all(self, channel: int, used: bool) -> None:
        for other in self._others if used else ():
            self._peers.wait_signal(other, channel)

    def _stage(self, rank: int, half: int, count: int) -> Tensor:
        """uint8 [count] of a rank's memory."""
        return self._peers.get_buffer(rank, (count,), torch.uint8, half * self._half)

    def _inbox(self, rank: int, half: int, source: int, room: int) -> Tensor:
        """fp32 [room]: the part of another rank's memory that `source` writes."""
        part = (source - rank) % self.size - 1
        return self._peers.get_buffer(rank, (room,), torch.float32, (2 + half) * self._half // 4 + part * room)


# --------------------
# Signals between GPUs through memory that they all map: a stream writes a number there, and another GPU's stream waits for it.
# CUDA's stream memory operations do this without a kernel, which would have to wait until a multiprocessor is free.
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
    """`Peers` (see `peer_copies.py`) over PyTorch's symmetric memory. Its first bytes are the signals, which are zeros on every
    rank before the first signal. Data follow at `data_start`. State: how many signals were put to each rank, and taken from
    each, by channel."""

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


class SequenceRanks:
    """The exchange of the ranks that have the tokens of each sequence together, in the lane compute. `position`: of this rank
    among them. `group`: None if a rank has whole sequences. `finish`: as in `Exchanges`."""

    def __init__(self, position: int, group: dist.ProcessGroup | None, finish: Callable[[Any], None]) -> None:
        self.position, self._group, self._finish = position, group, finish

    def all_to_all(self, sent: Tensor) -> Tensor:
        """[n, ...] -> [n, ...]: part i of the result is what rank i sent to this one."""
        assert self._group is not None, "a rank has whole sequences"
        received = torch.empty_like(sent)
        given = received.view(-1).view(torch.uint8), sent.view(-1).view(torch.uint8)
        if sent.device.type == "cuda":
            dist.all_to_all_single(*given, group=self._group)
        else:
            self._finish(dist.all_to_all_single(*given, group=self._group, async_op=True))
        return received


#: Bytes of device memory for exchanges by copies.
PEER_MEMORY_BYTES = HALVES_BYTES + (1 << 16)


class Exchanges:
    """`finish(work)` waits for a collective on a CPU, and raises `RankError`. State: the memory for exchanges by copies."""

    def __init__(self, hosts: Hosts, device: torch.device, lane: dist.ProcessGroup | None, across: dist.ProcessGroup | None,
                 host: dist.ProcessGroup | None, finish: Callable[[Any], None]) -> None:
        self.rank, self.size, self.copies = hosts.local, hosts.ranks, hosts.copies
        self.divided = hosts.spread > 1
        self.device = device
        self._lane, self._across, self._host, self._finish = lane, across, host, finish
        self._copies: PeerCopies | None = None

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory for exchanges by copies, which PyTorch's allocator does not count."""
        return 0 if self._copies is None else PEER_MEMORY_BYTES

    def connect(self, peer_copies: bool | None, agree: Callable[[bool], bool]) -> None:
        """Connects the devices. This takes some hundred MiB of device memory, which budgets must not count as free. Connects
        them for copies if they can reach each other's memory (`peer_copies` None) or if the user says so, and for NCCL, which
        connects them in its first collective of a kind. `agree`: whether all ranks say yes. Raises `UnsupportedError` if copies
        are asked for and not possible."""
        if self.divided:
            if peer_copies:
                raise UnsupportedError("peer_copies copies between the GPUs of one host, and this copy of the model is divided "
                                       "among hosts: leave it out, so that NCCL makes the exchanges")
        elif self.device.type == "cuda" and peer_copies is not False:
            signals, why = None, ""
            try:
                if self._lane is not None:
                    memory, handle = memory_of_peers(PEER_MEMORY_BYTES, self.device, self._lane)
                    signals = StreamSignals(memory, handle, self.rank, self.size)
            except (OSError, RuntimeError) as error:
                why = str(error).splitlines()[0]
            if agree(signals is not None) and signals is not None:
                self._copies = PeerCopies(signals, self.rank, self.size)
            elif peer_copies and self._lane is not None:
                raise UnsupportedError("the GPUs of the ranks cannot reach each other's memory: leave peer_copies out, so that "
                                       f"NCCL makes the exchanges (cause: {why or 'reported by another rank'})")
        whole = torch.zeros(4 * self.size, dtype=torch.uint8, device=self.device)
        if self._lane is not None:
            self.gather(whole, whole[4 * self.rank:4 * (self.rank + 1)])
            self.reduce_scatter(whole.view(torch.float32))
        if self._across is not None:
            self.all_reduce(whole.view(torch.float32))
        self.add_up(whole.view(torch.float32))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Frees the memory for exchanges by copies."""
        self._copies = None

    # ---------------------------------------------------------------- within a copy
    def gather(self, whole: Tensor, shard: Tensor) -> None:
        """Fills `whole`, uint8 [size * n] on the device, with the shards of all ranks of this copy, uint8 [n] each. `shard` may
        be this rank's part of `whole`."""
        if self._copies is not None:
            self._copies.gather(whole, shard)
            return
        assert self._lane is not None, "one rank in a copy"
        if self.device.type == "cuda":
            all_gather(whole, shard, self._lane, wait=True)
            return
        self._finish(all_gather(whole, shard.clone(), self._lane, wait=False))

    def reduce_scatter(self, flat: Tensor) -> None:
        """Adds up `flat`, fp32 [size * n], over the ranks of this copy. Afterwards this rank's n elements hold the sums, and
        the others are undefined. The order of the sums is that of the ranks on a CPU, and that of `PeerCopies` or of NCCL on
        CUDA."""
        if self._copies is not None:
            self._copies.reduce_scatter(flat)
            return
        assert self._lane is not None, "one rank in a copy"
        own = self._own(flat)
        if self.device.type == "cuda":
            reduce_scatter(own, flat, self._lane)
            return
        received = torch.empty_like(flat)
        self._finish(dist.all_to_all_single(received, flat, group=self._lane, async_op=True))
        parts = received.view(self.size, -1)
        own.copy_(parts[0])
        for part in parts[1:]:
            own.add_(part)

    def join_norms(self, norms: Tensor) -> None:
        """Norms of shards, fp32 [n] on the device -> norms of whole gradients, with the same bits on every rank."""
        self._join(norms, self._lane)

    def join_host_norms(self, norms: Tensor) -> None:
        """Like `join_norms`, in host memory and in the lane cpu."""
        self._join(norms, self._host)

    def _join(self, norms: Tensor, group: dist.ProcessGroup | None) -> None:
        squares = norms.double().square()  # the square of a large fp32 norm is not an fp32 number
        self._add_in_copy(squares, group)
        norms.copy_(squares.sqrt())

    # ---------------------------------------------------------------- between copies
    def all_reduce(self, flat: Tensor) -> None:
        """Adds up this rank's shard of `flat`, fp32 [size * n], over the copies, with the same bits in each."""
        own = self._own(flat)
        if self.device.type == "cuda":  # NCCL adds up each element once, and sends the sum to all
            dist.all_reduce(own, group=self._across)
        else:
            self._add_in_order(own, self._across, self.copies)

    def add_up(self, value: Tensor) -> None:
        """Adds up a tensor on the device over all ranks of all copies, in place, with the same bits on every rank."""
        if self.size > 1:
            self._add_in_copy(value, self._lane)
        if self.copies > 1:
            self._add_in_order(value, self._across, self.copies)

    # ---------------------------------------------------------------- sums
    def _own(self, flat: Tensor) -> Tensor:
        """This rank's shard of a tensor."""
        return flat.view(self.size, -1)[self.rank]

    def _add_in_copy(self, value: Tensor, group: dist.ProcessGroup | None) -> None:
        """Adds up a short tensor over the ranks of this copy, with the same bits on all of them, and in all copies."""
        if self.copies > 1:  # libraries may add in another order elsewhere
            self._add_in_order(value, group, self.size)
        elif value.device.type == "cuda":
            dist.all_reduce(value, group=group)
        else:
            self._finish(dist.all_reduce(value, group=group, async_op=True))

    def _add_in_order(self, value: Tensor, group: dist.ProcessGroup | None, size: int) -> None:
        """Adds up a tensor over a group in the order of its ranks."""
        assert group is not None, "a sum over one rank"
        received = value.new_empty(size * value.numel())
        work = all_gather(received, value.flatten(), group, wait=value.device.type == "cuda")
        if value.device.type != "cuda":
            self._finish(work)
        first, *others = received.view(size, *value.shape)
        value.copy_(first)
        for other in others:
            value.add_(other)
