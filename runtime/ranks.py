"""The other ranks of a job: collectives of the lanes, and agreements between the callers.

Three process groups, because three threads of a process use them at the same time: the lane `collective` exchanges weights and
gradients (NCCL, or gloo on CPUs), the lane `cpu` exchanges norms in host memory, and the caller's thread agrees with the other
callers on what runs next. The collectives of a group run in the same order on every rank.

Every wait looks at the board (`StatusBoard`): a rank that has ended, or has failed, ends the others with its name and cause.
"""
from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megacompile.errors import RankError, UnsupportedError, shortened
from megacompile.runtime.peer_copies import PeerCopies
from megacompile.system.shared_memory import SharedMemory
from megacompile.system.status_board import ROW_BYTES, StatusBoard
from megacompile.torch_compat.distributed import all_gather, memory_of_peers, never_end, reduce_scatter
from megacompile.version import __version__

#: How long a wait sleeps between two looks, in seconds: at first, and at most.
_FIRST_S, _LONGEST_S = 2e-5, 2e-3
#: How often a wait looks at the board, in seconds.
_LOOK_S = 0.05
#: How long a process may take to end once it has closed its connections, in seconds.
_ENDING_S = 5.0
#: Bytes that ranks exchange at once, where their values are no larger. Most are not.
_LETTER_BYTES = 4096
#: The limit of groups that wait for as long as the others work.
_UNLIMITED = timedelta(seconds=10**6)


class Ranks:
    """`rank`: this process, of `size`. State: the process groups, the `board` once all ranks have it, how many updates were
    submitted, and how many of them this rank's lanes have finished."""

    def __init__(self, device: torch.device, timeout_s: float | None) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device, self.timeout_s = device, timeout_s
        limit = _UNLIMITED if timeout_s is None else timedelta(seconds=2 * timeout_s)  # later than `_finish` gives up
        self._lane = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo", timeout=limit)
        self._host = dist.new_group(backend="gloo", timeout=limit)
        self._callers = dist.new_group(backend="gloo", timeout=limit)
        self._groups: tuple[dist.ProcessGroup, ...] = (self._lane, self._host, self._callers)
        self.board: StatusBoard | None = None
        self.submitted = self.finished = 0
        self._copies: PeerCopies | None = None
        self._peer_memory: Tensor | None = None

    def warm_up(self) -> None:
        """Connects the devices, which takes some hundred MiB of device memory that budgets must not count as free: by copies
        where they can reach each other's memory, and by NCCL, which connects them in its first collective of a kind."""
        if self.device.type == "cuda":
            try:
                self._peer_memory, peers = memory_of_peers(PeerCopies.memory_bytes(), self.device, self._lane)
            except RuntimeError:  # they have no direct link, or the system does not let processes share device memory
                peers = None
            if all(self.agree("stream", peers is not None)):
                self._copies = PeerCopies(peers, self.rank, self.size)
        whole = torch.zeros(4 * self.size, dtype=torch.uint8, device=self.device)
        self.gather(whole, whole[4 * self.rank:4 * (self.rank + 1)])
        self.reduce_scatter(whole.view(torch.float32))
        self.add_up(whole.view(torch.float32))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # ---------------------------------------------------------------- in lanes
    def gather(self, whole: Tensor, shard: Tensor) -> None:
        """Fills `whole`, uint8 [size * n] on the device, with the shards of all ranks, uint8 [n] each. `shard` may be this
        rank's part of `whole`."""
        if self._copies is not None:
            self._copies.gather(whole, shard)
            return
        if self.device.type == "cuda":
            all_gather(whole, shard, self._lane, wait=True)
            return
        self._finish(all_gather(whole, shard.clone(), self._lane, wait=False))

    def reduce_scatter(self, flat: Tensor) -> None:
        """Adds up `flat`, fp32 [size * n], over the ranks. This rank's n elements hold the sums afterwards; the others hold
        nothing of use. The sums are taken in the order of the ranks on a CPU, in that of `PeerCopies` or of NCCL on CUDA."""
        if self._copies is not None:
            self._copies.reduce_scatter(flat)
            return
        count = flat.numel() // self.size
        own = flat[self.rank * count:(self.rank + 1) * count]
        if self.device.type == "cuda":
            reduce_scatter(own, flat, self._lane)
            return
        received = torch.empty_like(flat)
        self._finish(dist.all_to_all_single(received, flat, group=self._lane, async_op=True))
        parts = received.view(self.size, count)
        own.copy_(parts[0])
        for part in parts[1:]:
            own.add_(part)

    def join_norms(self, norms: Tensor) -> None:
        """Norms of shards, fp32 [n] on the device -> norms of whole gradients, the same bits on every rank."""
        self._join(norms, self._lane)

    def join_host_norms(self, norms: Tensor) -> None:
        """As `join_norms`, in host memory and in the lane cpu."""
        self._join(norms, self._host)

    def _join(self, norms: Tensor, group: dist.ProcessGroup) -> None:
        squares = norms.double().square()  # the square of a large fp32 norm is not an fp32 number
        self._sum(squares, group)
        norms.copy_(squares.sqrt())

    def updated(self) -> None:
        """Called by the last op of an update: this rank's shards in host memory are those of the update."""
        self.finished += 1
        if self.board is not None:
            self.board.finished(self.finished)

    def add_up(self, value: Tensor) -> None:
        """Adds up a tensor on the device over the ranks, in place, with the same bits on every rank."""
        self._sum(value, self._lane)

    def _sum(self, value: Tensor, group: dist.ProcessGroup) -> None:
        if value.device.type == "cuda":
            dist.all_reduce(value, group=group)
        else:
            self._finish(dist.all_reduce(value, group=group, async_op=True))

    # ---------------------------------------------------------------- in the caller's thread
    def agree(self, doing: str, value: Any = None) -> list[Any]:
        """Waits until all ranks call this, and returns their values in the order of the ranks: tensors, numbers, text, and
        tuples, lists and dicts of them. Raises `RankError` if another rank does something else, has failed or has ended."""
        if self.board is not None:
            self.board.reached()
        found = self.exchange((doing, value), self._callers)
        for rank, (other, _) in enumerate(found):
            if other != doing:
                raise RankError(f"rank {rank} calls {other} while rank {self.rank} calls {doing}: make the same calls in the "
                                "same order on every rank (only evaluations may differ)")
        return [given for _, given in found]

    def agree_on(self, doing: str, what: str, value: Any) -> None:
        """As `agree`. Raises `RankError` unless all ranks give the same value, which is `what` it is for a message."""
        values = self.agree(doing, value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise RankError(f"rank {rank} has another {what} than rank 0: start all ranks with the same model, options and "
                                f"versions (rank {rank}: {shortened(str(other))}; rank 0: {shortened(str(values[0]))})")

    def wait_for_updates(self) -> None:
        """Waits until every rank has finished all updates that were submitted here. Then the tiles in host memory are whole.
        Raises `RankError`."""
        if (board := self.board) is not None:
            self._wait(lambda: board.all_finished(self.submitted))

    def _wait(self, done: Callable[[], bool], patient: bool = False) -> None:
        """Sleeps until `done`, and looks at the board from time to time. `patient`: as in `exchange`."""
        pause, begun = _FIRST_S, time.monotonic()
        looked = begun
        while not done():
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)
            now = time.monotonic()
            if now - looked > _LOOK_S:
                looked = now
                self.check(failures=not patient)
            if self.timeout_s is not None and not patient and now - begun > self.timeout_s:
                behind = "" if self.board is None else self.board.behind()
                raise RankError(f"rank {self.rank} has waited for {self.timeout_s:g} s{behind}: find out what the other ranks "
                                "do, or raise stall_timeout, and start the job again from the last checkpoint")

    def new_group(self) -> dist.ProcessGroup:
        """A group for a thread of every rank that exchanges values beside the callers. All callers make it together. The thread
        may wait for as long as the others work."""
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_UNLIMITED)
        self._groups += (group,)
        return group

    def end_group(self, group: dist.ProcessGroup) -> None:
        """Ends a group, unless a wait for another rank has failed."""
        if group in self._groups:
            self._groups = tuple(other for other in self._groups if other is not group)
            dist.destroy_process_group(group)

    def exchange(self, value: Any, group: dist.ProcessGroup, patient: bool = False) -> list[Any]:
        """The values of all ranks, in their order. Raises `RankError` if another rank has ended or has failed, or after
        `timeout_s`. `patient`: only if another rank has ended or was stopped."""
        written = io.BytesIO()
        torch.save(value, written)
        data = torch.frombuffer(written.getbuffer(), dtype=torch.uint8)
        first = torch.zeros(_LETTER_BYTES, dtype=torch.uint8)  # the number of bytes, and as many of them as fit
        first[:8].view(torch.int64).fill_(data.numel())
        first[8:8 + data.numel()] = data[:_LETTER_BYTES - 8]
        letters = self._all(first, group, patient)
        sizes = [int(letter[:8].view(torch.int64)) for letter in letters]
        parts = letters[:, 8:]
        if (longest := max(sizes)) > parts.shape[1]:
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[:data.numel()] = data
            parts = self._all(padded, group, patient)
        return [torch.load(io.BytesIO(part[:size].numpy()), weights_only=True) for part, size in zip(parts, sizes, strict=True)]

    def _all(self, own: Tensor, group: dist.ProcessGroup, patient: bool) -> Tensor:
        """The tensors uint8 [n] of all ranks, [size, n]."""
        received = torch.zeros(self.size * own.numel(), dtype=torch.uint8)
        self._finish(all_gather(received, own, group, wait=False), patient)
        return received.view(self.size, own.numel())

    def shared_memory(self, sizes: Mapping[str, int], doing: str = "stream") -> SharedMemory:
        """Memory that all ranks map, made by rank 0. Each rank must give the same sizes. `doing`: as in `agree`."""
        memory = SharedMemory(sizes) if self.rank == 0 else None
        address = self.agree(doing, None if memory is None else memory.address)[0]
        memory = memory or SharedMemory(sizes, address)
        self.agree(doing)  # the others have opened it before rank 0 may close it
        return memory

    # ---------------------------------------------------------------- waiting and failing
    def _finish(self, work: Any, patient: bool = False) -> None:
        """Waits for a collective on the host. Raises `RankError`. `patient`: as in `exchange`."""
        try:
            self._wait(work.is_completed, patient)
            work.wait()
        except RankError:
            for each in (work, *self._groups):
                never_end(each)
            self._groups = ()
            raise
        except RuntimeError as error:  # a connection was closed
            self._name_the_rank_that_ends(patient)
            raise RankError(f"the ranks have lost their connection ({str(error).splitlines()[0]}): start the job again from "
                            "the last checkpoint") from error

    def _name_the_rank_that_ends(self, patient: bool) -> None:
        """Raises `RankError` as soon as another rank has ended. A process closes its connections a while before."""
        limit = time.monotonic() + _ENDING_S
        while time.monotonic() < limit:
            self.check(failures=not patient)
            time.sleep(_LOOK_S)

    def check(self, failures: bool = True) -> None:
        """Raises `RankError` if another rank has ended or was stopped, and with `failures` if it has failed."""
        board = self.board  # `close` may remove it while a checkpoint's writer looks
        if board is not None and (cause := board.trouble(failures)):
            raise RankError(f"{cause}: the other ranks cannot go on; start the job again from the last checkpoint")

    def failed(self, error: BaseException) -> None:
        """Tells the other ranks that this one has failed, unless it is because another rank has."""
        if self.board is not None and not isinstance(error, RankError):
            self.board.fail(error)

    def close(self) -> None:
        """Ends the process groups of lanes and callers. The lanes must be idle. Writers of checkpoints end their own."""
        if self.board is not None:
            self.board.close()
            self.board = None
        self._copies = self._peer_memory = None
        for group in (self._lane, self._host, self._callers):
            self.end_group(group)


def connect(device: torch.device, timeout_s: float | None) -> Ranks:
    """Connects the processes of torch.distributed's default group, which must all be on this host. Raises `UnsupportedError` if
    they are not."""
    ranks = Ranks(device, timeout_s)
    hosts = ranks.agree("stream", Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
    if len(set(hosts)) > 1:
        raise UnsupportedError("the ranks are on several hosts, which is not supported yet: start them on one host (torchrun "
                               "--standalone)")
    ranks.agree_on("stream", "version", f"megacompile {__version__}, torch {torch.__version__}")
    processes = ranks.agree("stream", os.getpid())
    memory = ranks.shared_memory({"board": ROW_BYTES * ranks.size})
    ranks.board = StatusBoard(memory.piece("board"), ranks.rank, processes)
    memory.close()
    ranks.warm_up()
    return ranks
