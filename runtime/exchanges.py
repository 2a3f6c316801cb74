"""What the lanes of several ranks exchange: weights and gradients between the ranks of a host, sums of gradients between hosts.

Three groups, since two lanes use them at the same time: the lane `collective` exchanges weights, gradients and norms on the
device with the ranks of this host, and sums with the ranks of other hosts that have the same shard (NCCL, or gloo on CPUs); the
lane `cpu` exchanges norms in host memory with the ranks of this host. A group of one rank is None, and is not used.

Every host must come to the same bits, or the copies of the model would drift apart. Sums over hosts, and sums of norms where
there are several hosts, therefore do not depend on the order in which a library adds.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megacompile.compat.distributed import all_gather, memory_of_peers, reduce_scatter
from megacompile.errors import UnsupportedError
from megacompile.runtime.backends.stream_signals import StreamSignals
from megacompile.runtime.hosts import Hosts
from megacompile.runtime.peer_copies import HALVES_BYTES, PeerCopies

#: Bytes of device memory for exchanges by copies.
PEER_MEMORY_BYTES = HALVES_BYTES + (1 << 16)


class Exchanges:
    """`finish(work)` waits for a collective on a CPU, and raises `RankError`. State: the memory for exchanges by copies."""

    def __init__(self, hosts: Hosts, device: torch.device, lane: dist.ProcessGroup | None, across: dist.ProcessGroup | None,
                 host: dist.ProcessGroup | None, finish: Callable[[Any], None]) -> None:
        self.rank, self.size, self.hosts = hosts.local, hosts.ranks, hosts.count
        self.device = device
        self._lane, self._across, self._host, self._finish = lane, across, host, finish
        self._copies: PeerCopies | None = None

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory for exchanges by copies, which PyTorch's allocator does not count."""
        return 0 if self._copies is None else PEER_MEMORY_BYTES

    def connect(self, peer_copies: bool | None, agree: Callable[[bool], bool]) -> None:
        """Connects the devices, which takes some hundred MiB of device memory that budgets must not count as free: for copies,
        where they can reach each other's memory (`peer_copies` None) or because the user has said so, and for NCCL, which
        connects them in its first collective of a kind. `agree`: whether all ranks say yes. Raises `UnsupportedError` if copies
        are asked for and not possible."""
        if self.device.type == "cuda" and peer_copies is not False:
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
        """Gives back the memory for exchanges by copies."""
        self._copies = None

    # ---------------------------------------------------------------- within a host
    def gather(self, whole: Tensor, shard: Tensor) -> None:
        """Fills `whole`, uint8 [size * n] on the device, with the shards of all ranks of this host, uint8 [n] each. `shard` may
        be this rank's part of `whole`."""
        if self._copies is not None:
            self._copies.gather(whole, shard)
            return
        assert self._lane is not None, "one rank on a host"
        if self.device.type == "cuda":
            all_gather(whole, shard, self._lane, wait=True)
            return
        self._finish(all_gather(whole, shard.clone(), self._lane, wait=False))

    def reduce_scatter(self, flat: Tensor) -> None:
        """Adds up `flat`, fp32 [size * n], over the ranks of this host. This rank's n elements hold the sums afterwards; the
        others hold nothing of use. The sums are taken in the order of the ranks on a CPU, in that of `PeerCopies` or of NCCL on
        CUDA."""
        if self._copies is not None:
            self._copies.reduce_scatter(flat)
            return
        assert self._lane is not None, "one rank on a host"
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
        """Norms of shards, fp32 [n] on the device -> norms of whole gradients, the same bits on every rank."""
        self._join(norms, self._lane)

    def join_host_norms(self, norms: Tensor) -> None:
        """As `join_norms`, in host memory and in the lane cpu."""
        self._join(norms, self._host)

    def _join(self, norms: Tensor, group: dist.ProcessGroup | None) -> None:
        squares = norms.double().square()  # the square of a large fp32 norm is not an fp32 number
        self._add_on_host(squares, group)
        norms.copy_(squares.sqrt())

    # ---------------------------------------------------------------- between hosts
    def all_reduce(self, flat: Tensor) -> None:
        """Adds up this rank's shard of `flat`, fp32 [size * n], over the hosts: the same bits on every host."""
        own = self._own(flat)
        if self.device.type == "cuda":  # NCCL adds up each element once, and sends the sum to all
            dist.all_reduce(own, group=self._across)
        else:
            self._add_in_order(own, self._across, self.hosts)

    def add_up(self, value: Tensor) -> None:
        """Adds up a tensor on the device over all ranks of all hosts, in place, with the same bits on every rank."""
        if self.size > 1:
            self._add_on_host(value, self._lane)
        if self.hosts > 1:
            self._add_in_order(value, self._across, self.hosts)

    # ---------------------------------------------------------------- sums
    def _own(self, flat: Tensor) -> Tensor:
        """This rank's shard of a tensor."""
        return flat.view(self.size, -1)[self.rank]

    def _add_on_host(self, value: Tensor, group: dist.ProcessGroup | None) -> None:
        """Adds up a short tensor over the ranks of this host, with the same bits on all of them, and on all hosts."""
        if self.hosts > 1:  # libraries may add in another order on another host
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
