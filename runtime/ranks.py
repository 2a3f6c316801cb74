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
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megacompile.errors import RankError, UnsupportedError, shortened
from megacompile.runtime.backends.stream_signals import StreamSignals
from megacompile.runtime.peer_copies import HALVES_BYTES, PeerCopies
from megacompile.system.mailbox import MOST_BYTES, RANK_BYTES, Mailbox
from megacompile.system.shared_memory import SharedMemory
from megacompile.system.status_board import ROW_BYTES, StatusBoard
from megacompile.torch_compat.distributed import all_gather, memory_of_peers, never_end, reduce_scatter
from megacompile.version import __version__

#: For how long callers that wait for each other do not sleep, in seconds. Where updates occupy all cores, a sleep takes
#: milliseconds.
_AWAKE_S = 2e-3
#: How long a wait sleeps between two looks, in seconds: at first, and at most.
_FIRST_S, _LONGEST_S = 2e-5, 1e-3
#: Bytes of device memory for exchanges by copies.
PEER_MEMORY_BYTES = HALVES_BYTES + (1 << 16)
#: How often a wait looks at the board, in seconds.
_LOOK_S = 0.05
#: How long a process may take to end once it has closed its connections, in seconds.
_ENDING_S = 5.0
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
        self.mailbox: Mailbox | None = None
        self.submitted = self.finished = 0
        self._copies: PeerCopies | None = None

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory for exchanges by copies, which PyTorch's allocator does not count."""
        return 0 if self._copies is None else PEER_MEMORY_BYTES

    def connect_devices(self, peer_copies: bool | None) -> None:
        """Connects the devices, which takes some hundred MiB of device memory that budgets must not count as free: for copies,
        where they can reach each other's memory (`peer_copies` None) or because the user has said so, and for NCCL, which
        connects them in its first collective of a kind. Raises `UnsupportedError` if copies are asked for and not possible."""
        if self.device.type == "cuda" and peer_copies is not False:
            signals, why = None, ""
            try:
                memory, handle = memory_of_peers(PEER_MEMORY_BYTES, self.device, self._lane)
                signals = StreamSignals(memory, handle, self.rank, self.size)
            except (OSError, RuntimeError) as error:
                why = str(error).splitlines()[0]
            if all(self.agree("stream", signals is not None)) and signals is not None:
                self._copies = PeerCopies(signals, self.rank, self.size)
            elif peer_copies:
                raise UnsupportedError("the GPUs of the ranks cannot reach each other's memory: leave peer_copies out, which "
                                       f"leaves exchanges to NCCL ({why or 'on another rank'})")
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
        found = self._exchange_among_callers((doing, value))
        for rank, (other, _) in enumerate(found):
            if other != doing:
                raise RankError(f"rank {rank} calls {other} while rank {self.rank} calls {doing}: make the same calls in the "
                                "same order on every rank (only evaluations may differ)")
        return [given for _, given in found]

    def agree_on(self, doing: str, what: str, value: Any) -> None:
        """As `agree`. Raises `RankError` unless all ranks give the same value, which is `what` it is for a message."""
        self.require_equal(what, self.agree(doing, value))

    def require_equal(self, what: str, values: Sequence[Any]) -> None:
        """Raises `RankError` unless all ranks have the same value, which is `what` it is for a message."""
        for rank, other in enumerate(values):
            if other != values[0]:
                raise RankError(f"rank {rank} has another {what} than rank 0: start all ranks with the same model, options and "
                                f"versions (rank {rank}: {shortened(str(other))}; rank 0: {shortened(str(values[0]))})")

    def wait_for_updates(self) -> None:
        """Waits until every rank has finished all updates that were submitted here. Then the tiles in host memory are whole.
        Raises `RankError`."""
        if (board := self.board) is not None:
            self._wait(lambda: board.all_finished(self.submitted))

    def _wait(self, done: Callable[[], bool], patient: bool = False, awake_s: float = 0.0) -> None:
        """Sleeps until `done`, and looks at the board from time to time. Does not sleep in the first `awake_s` seconds.
        `patient`: as in `exchange`."""
        pause, begun = _FIRST_S, time.monotonic()
        looked = begun
        while not done():
            now = time.monotonic()
            if now - begun < awake_s:
                time.sleep(0)  # other threads of this process may run
                continue
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)
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
        data = torch.frombuffer(bytearray(_written(value)), dtype=torch.uint8)
        sizes = torch.zeros(self.size, dtype=torch.int64)
        self._finish(all_gather(sizes, torch.tensor([data.numel()]), group, wait=False), patient)
        longest = int(sizes.max())
        padded, received = torch.zeros(longest, dtype=torch.uint8), torch.zeros(self.size * longest, dtype=torch.uint8)
        padded[:data.numel()] = data
        self._finish(all_gather(received, padded, group, wait=False), patient)
        parts = received.view(self.size, longest)
        return [_read(part[:size].numpy()) for part, size in zip(parts, sizes.tolist(), strict=True)]

    def _exchange_among_callers(self, value: Any) -> list[Any]:
        """As `exchange`, by the mailbox if no value is too long for it: no other thread must wake up, which takes milliseconds
        while updates occupy all cores."""
        if self.mailbox is None:
            return self.exchange(value, self._callers)
        self.mailbox.put(_written(value))
        letters: list[tuple[int, bytes]] | None = None

        def all_there() -> bool:
            nonlocal letters
            letters = self.mailbox.all() if self.mailbox is not None else None
            return letters is not None

        self._wait(all_there, awake_s=_AWAKE_S)
        assert letters is not None
        if max(size for size, _ in letters) > MOST_BYTES:
            return self.exchange(value, self._callers)
        return [_read(told) for _, told in letters]

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
        self._copies = None
        for group in (self._lane, self._host, self._callers):
            self.end_group(group)


def connect(device: torch.device, timeout_s: float | None, peer_copies: bool | None = None) -> Ranks:
    """Connects the processes of torch.distributed's default group, which must all be on this host. `peer_copies`: as in
    `StreamConfig`. Raises `UnsupportedError` if they are not, and what `Ranks.connect_devices` raises."""
    ranks = Ranks(device, timeout_s)
    hosts = ranks.agree("stream", Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
    if len(set(hosts)) > 1:
        raise UnsupportedError("the ranks are on several hosts, which is not supported yet: start them on one host (torchrun "
                               "--standalone)")
    ranks.agree_on("stream", "version", f"megacompile {__version__}, torch {torch.__version__}")
    processes = ranks.agree("stream", os.getpid())
    memory = ranks.shared_memory({"board": ROW_BYTES * ranks.size, "mailbox": RANK_BYTES * ranks.size})
    ranks.board = StatusBoard(memory.piece("board"), ranks.rank, processes)
    ranks.mailbox = Mailbox(memory.piece("mailbox"), ranks.rank)
    memory.close()
    ranks.connect_devices(peer_copies)
    return ranks


def _written(value: Any) -> bytes:
    """A value as bytes that `_read` reads, without pickles."""
    written = io.BytesIO()
    torch.save(value, written)
    return written.getvalue()


def _read(data: Any) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)
