"""Exchanges between the GPUs of a host by their copy engines, which leave the multiprocessors to the layers.

NCCL's kernels hold some multiprocessors. A matrix product that has a block for each of them must then wait for those blocks, so
that compute stands still for about as long as an exchange takes. Copies from one GPU's memory to another's need no
multiprocessor.

Each rank has a `stage`, from which the others read its shard in a gather, and an `inbox`, into which they write their parts of
a sum. Both have two halves, so that one chunk is copied while the one before it is read:

    gather           stage own chunk -> signal STAGED -> copy the others' chunks from their stages -> signal READ
    reduce_scatter   copy each rank's part of my chunk into its inbox -> signal WRITTEN -> add up the inbox -> signal ADDED

A half is used again once READ or ADDED has come from every other rank. Signals are values in memory that all GPUs map; the
lane's stream waits for them, and the host does not.
"""
from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

#: Bytes of a half of the stage, and of a half of the inbox.
HALF_BYTES = 1 << 26
#: Bytes of `Peers`' memory: both halves of both.
HALVES_BYTES = 4 * HALF_BYTES
#: Parts of a chunk begin at multiples of so many elements.
_ALIGNED = 64
_STAGED, _READ, _WRITTEN, _ADDED = range(0, 8, 2)  # channels of signals: one for each half


class Peers(Protocol):
    """Memory of the same size on every rank, and signals between ranks, in the order of the current stream. A wait takes the
    signal. A signal that was not taken yet is waited for before it is put again."""

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int) -> Tensor: ...

    def put_signal(self, dst_rank: int, channel: int) -> None: ...

    def wait_signal(self, src_rank: int, channel: int) -> None: ...


class PeerCopies:
    """The exchanges of one rank. Every rank makes the same ones, in the same order. State: how many chunks were gathered, and
    how many were added up."""

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
        """Adds up `flat`, fp32 [size * n], over the ranks. This rank's n elements hold the sums afterwards: its own values,
        then those of the other ranks in their order."""
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
        """fp32 [room]: where `source` writes in another rank's memory."""
        part = (source - rank) % self.size - 1
        return self._peers.get_buffer(rank, (room,), torch.float32, (2 + half) * self._half // 4 + part * room)
