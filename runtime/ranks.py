"""The other ranks of a job: their process groups, agreements between the callers, and waits.

Several process groups, because several threads of a process use them at the same time: the lanes exchange values
(`exchanges.py`), and the caller's thread agrees with the other callers on what runs next. The collectives of a group run in the
same order on every rank.

Every wait looks at the board (`StatusBoard`): a rank that has ended, or has failed, ends the others with its name and cause.
`DeviceWatch` looks for callers that wait inside CUDA. With several hosts, `HostWatch` tells the board of each host how the
ranks of the others are.
"""
from __future__ import annotations

import io
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megacompile.compat.distributed import all_gather, end, never_end
from megacompile.errors import RankError, shortened
from megacompile.runtime.exchanges import Exchanges, SequenceRanks
from megacompile.runtime.hosts import Rows, arranged, identity
from megacompile.runtime.letters import Letters, Listener, connected, pieces
from megacompile.runtime.rank_watch import ROW_BYTES, DeviceWatch, HostWatch, StatusBoard, limit_exit
from megacompile.system.host_memory import SharedMemory
from megacompile.version import __version__

T = TypeVar("T")

#: For how long callers that wait for each other do not sleep, in seconds. Where updates occupy all cores, a sleep takes
#: milliseconds.
_AWAKE_S = 2e-3
#: Seconds that a wait sleeps between two looks: at first, and at most.
_FIRST_S, _LONGEST_S = 2e-5, 1e-3
#: Bytes of host memory that are sent to other hosts at a time.
_CHUNK_BYTES = 1 << 26
#: Seconds between two looks of a wait at the board.
_LOOK_S = 0.05
#: Seconds that data from a rank may take to arrive.
_ARRIVING_S = 0.2
#: Seconds that a process may take to end once it has closed its connections.
_ENDING_S = 5.0
#: The limit of groups that wait for as long as the others work.
_UNLIMITED = timedelta(seconds=10**6)


class Ranks:
    """`rank`: this process, of `size`. `hosts`: where all of them are. `exchanges`: what lanes exchange. State: the process
    groups, the `board` once all ranks of the host have it, how many updates were submitted, how many of them this rank's lanes
    have finished, which thread calls the model, and whether an error has told it that the ranks cannot go on.

    `sequence_ranks`: how many of them, one after the other, have the tokens of each sequence together.

    Raises `UnsupportedError` for hosts that cannot train together. `mesh`: as in `arranged`."""

    def __init__(self, device: torch.device, timeout_s: float | None, mesh: Rows | None = None,
                 sequence_ranks: int = 1) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device, self.timeout_s = device, timeout_s
        limit = _UNLIMITED if timeout_s is None else timedelta(seconds=2 * timeout_s)  # later than `_finish` gives up
        self.board: StatusBoard | None = None
        self._letters: Letters | None = None
        self._watch: HostWatch | None = None
        self._device_watch: DeviceWatch | None = None
        self._caller, self._told = threading.get_ident(), False
        self.submitted = self.finished = 0
        self._callers = dist.new_group(backend="gloo", timeout=limit)
        self._groups: tuple[dist.ProcessGroup, ...] = (self._callers,)
        self.agree_on("stream", "version", f"megacompile {__version__}, torch {torch.__version__}")
        self.agree_on("stream", "number of ranks with a sequence together", sequence_ranks)  # they make groups together
        found = self.agree("stream", (identity(), mesh))
        self.hosts = arranged([each for each, _ in found], self.rank, [given for _, given in found])
        rows, columns = self.hosts.rows, tuple(zip(*self.hosts.rows, strict=True))
        lanes = "nccl" if device.type == "cuda" else "gloo"
        lane, across, host = (self._group(groups, backend, limit) for groups, backend in (
            (rows, lanes), (columns, lanes), (rows, "gloo")))
        self._between_hosts = self._group(columns, "gloo", _UNLIMITED)  # of host memory
        self._leaders = self._group([self.hosts.leaders], "gloo", limit)
        self.sequence_ranks = sequence_ranks
        sequences = [range(n, n + sequence_ranks) for n in range(0, self.size, sequence_ranks)]
        self.sequence = SequenceRanks(self.rank % sequence_ranks, self._group(sequences, lanes, limit), self._finish)
        divided = self.hosts.spread > 1
        self._memories = self._group(
            [[rank for rank in row if rank in self.hosts.leaders] for row in rows] if divided else (), "gloo", _UNLIMITED)
        self.exchanges = Exchanges(self.hosts, device, lane, across, host, self._finish)
        self._own_groups = self._groups  # writers of checkpoints add theirs, and end them

    def _group(self, groups: Iterable[Sequence[int]], backend: str, limit: timedelta) -> dist.ProcessGroup | None:
        """The group that this rank is in, of several groups; None if it is in none, or alone in one. All callers make all
        groups together."""
        own = None
        for ranks in groups:
            if len(ranks) > 1:
                made = dist.new_group(list(ranks), backend=backend, timeout=limit)
                own = made if self.rank in ranks else own
        if own is not None:
            self._groups += (own,)
        return own

    def connect_host(self) -> None:
        """Connects the processes: the board and the letters of this host, and the messages between hosts. Raises
        `RankError`."""
        hosts = self.hosts
        processes = self.agree("stream", os.getpid())
        memory = self.shared_memory({"board": ROW_BYTES * self.size, **pieces(hosts)})
        board = StatusBoard(memory.piece("board"), self.rank, processes, hosts.here, hosts.where)
        letters = Letters(hosts, memory, self._leaders, self._wait_for, self._finish)
        memory.close()
        linked = self._linked()
        self.board, self._letters = board, letters
        if linked:
            self._watch = HostWatch(board, hosts, linked)

    def _linked(self) -> dict[int, socket.socket]:
        """This rank's connections to the first ranks of other hosts. The first rank of all is connected to each of the others.
        Raises `RankError`."""
        first, *others = self.hosts.leaders
        if not others:
            return {}
        listener = Listener() if self.rank == first else None
        door, name = self.agree("stream", None if listener is None else (listener.door, socket.gethostname()))[first]
        found = {}
        if listener is not None:
            found = listener.accepted(len(others))
        elif self.rank in others:
            addresses = [address for address in (os.environ.get("MASTER_ADDR"), name) if address]
            found = {first: connected(addresses, door, self.rank)}
        self.agree("stream")
        return found

    def updated(self) -> None:
        """Called by the last op of an update, when this rank's shards in host memory are updated."""
        self.finished += 1
        if self.board is not None:
            self.board.finished(self.finished)

    # ---------------------------------------------------------------- in the caller's thread
    def agree(self, doing: str, value: Any = None) -> list[Any]:
        """Waits until all ranks call this, and returns their values in rank order: tensors, numbers, text, and tuples, lists
        and dicts of them. Raises `RankError` if another rank does something else, has failed or has ended."""
        self._caller = threading.get_ident()
        if self.board is not None:
            self.board.reached()
        found = self._exchange_among_callers((doing, value))
        self._told = False
        for rank, (other, _) in enumerate(found):
            if other != doing:
                raise RankError(f"rank {rank} calls {other} while rank {self.rank} calls {doing}: make the same calls in the "
                                "same order on every rank (only evaluations may differ)")
        return [given for _, given in found]

    def agree_on(self, doing: str, what: str, value: Any) -> None:
        """Like `agree`. Raises `RankError` unless all ranks give the same value. `what` names it in messages."""
        self.require_equal(what, self.agree(doing, value))

    def require_equal(self, what: str, values: Sequence[Any]) -> None:
        """Raises `RankError` unless all ranks have the same value. `what` names it in messages."""
        for rank, other in enumerate(values):
            if other != values[0]:
                raise RankError(f"rank {rank} has another {what} than rank 0: start all ranks with the same model, options and "
                                f"versions (rank {rank}: {shortened(str(other))}; rank 0: {shortened(str(values[0]))})")

    def wait_for_updates(self) -> None:
        """Waits until every rank of this host has finished all updates that were submitted here. Then the tiles in host memory
        are complete. Raises `RankError`."""
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
                try:
                    self.check(failures=not patient)
                except RankError:  # the other rank may have failed after it did its part
                    if _soon(done):
                        self._told = False
                        return
                    raise
            if self.timeout_s is not None and not patient and now - begun > self.timeout_s:
                late = "" if self.board is None else self.board.late_ranks()
                raise RankError(f"rank {self.rank} has waited for {self.timeout_s:g} s{late}: find out what the other ranks "
                                "do, or raise stall_timeout, and start the job again from the last checkpoint")

    def new_group(self) -> dist.ProcessGroup:
        """A group for a thread of every rank that exchanges values concurrently with the callers. All callers make it together.
        The thread may wait as long as the others work."""
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_UNLIMITED)
        self._groups += (group,)
        return group

    def end_group(self, group: dist.ProcessGroup) -> None:
        """Ends a group, unless a wait for another rank has failed, or the script has ended all groups."""
        if group in self._groups:
            self._groups = tuple(other for other in self._groups if other is not group)
            end(group)

    def exchange(self, value: Any, group: dist.ProcessGroup, patient: bool = False) -> list[Any]:
        """The values of all ranks, in rank order. Raises `RankError` if another rank has ended or has failed, or after
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
        """Like `exchange`, by letters if no value is too long for them. On one host letters wake up no other thread, which
        takes milliseconds while updates occupy all cores."""
        told = None if self._letters is None else self._letters.exchanged(_written(value))
        return self.exchange(value, self._callers) if told is None else [_read(each) for each in told]

    def _wait_for(self, poll: Callable[[], T | None]) -> T:
        """The result of `poll` once it is not None. Raises `RankError`."""
        found: list[T] = []

        def there() -> bool:
            if (each := poll()) is not None:
                found.append(each)
            return bool(found)

        self._wait(there, awake_s=_AWAKE_S)
        return found[0]

    def shared_memory(self, sizes: Mapping[str, int], doing: str = "stream") -> SharedMemory:
        """Memory that all ranks of this host map. The first rank makes it. Each rank must give the same sizes. `doing`: as in
        `agree`."""
        memory = SharedMemory(sizes) if self.hosts.leads else None
        address = self.agree(doing, None if memory is None else memory.address)[self.hosts.here[0]]
        memory = memory or SharedMemory(sizes, address)
        self.agree(doing)  # the others have opened it before the first may close it
        return memory

    def send_to_all_hosts(self, memory: Tensor) -> None:
        """Replaces a tensor, uint8 [n] in host memory, by the tensor of the rank with the same shard on the first host. Raises
        `RankError`."""
        assert self._between_hosts is not None, "one host"
        for start in range(0, len(memory), _CHUNK_BYTES):
            self._finish(dist.broadcast(memory[start:start + _CHUNK_BYTES], self.hosts.alike[0], group=self._between_hosts,
                                        async_op=True))

    def scatter(self, mine: Tensor, parts: list[Tensor] | None) -> None:
        """Fills `mine`, uint8 [n] in host memory, with this host's one of the `parts` that the first host of its copy has, all
        of one size. The first ranks of all hosts of a copy call this. Raises `RankError`."""
        self._finish(dist.scatter(mine, parts, src=self.hosts.row[0], group=self._memories, async_op=True))

    def gather(self, mine: Tensor) -> list[Tensor]:
        """The tensors of all hosts of this copy, uint8 [n] in host memory. Otherwise as `scatter`."""
        assert self._memories is not None, "a copy on one host"
        found = torch.empty(self.hosts.spread * len(mine), dtype=torch.uint8)
        self._finish(all_gather(found, mine, self._memories, wait=False))
        return list(found.view(self.hosts.spread, -1))

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
        """Raises `RankError` as soon as another rank has ended. A process closes its connections some time before it ends."""
        limit = time.monotonic() + _ENDING_S
        while time.monotonic() < limit:
            self.check(failures=not patient)
            time.sleep(_LOOK_S)

    def check(self, failures: bool = True) -> None:
        """Raises `RankError` if another rank has ended or was stopped. With `failures`, also if it has failed."""
        if cause := self._trouble(failures):
            self._told |= threading.get_ident() == self._caller
            self._tell_other_hosts()
            if self.device.type == "cuda":
                limit_exit()
            raise RankError(cause)

    def _trouble(self, failures: bool = True) -> str:
        """The message of `check`, or "" if `check` raises nothing."""
        board = self.board  # `close` may remove it while another thread looks
        cause = "" if board is None else board.trouble(failures)
        return cause and f"{cause}: the other ranks cannot go on; start the job again from the last checkpoint"

    def watch_device(self, busy: Callable[[], bool]) -> None:
        """Makes this process end if its caller waits inside CUDA for a rank that has ended. `busy`: whether the device has
        exchanges to finish. It is called in a separate thread."""
        self._device_watch = DeviceWatch(lambda: self._trouble(failures=False), busy, lambda: self._caller, lambda: self._told)
        self._device_watch.start()

    def failed(self, error: BaseException) -> None:
        """Tells the other ranks that this one has failed, unless another rank caused it. The caller gets the error."""
        self._told = True
        if self.board is not None and not isinstance(error, RankError):
            self.board.fail(error)
            self._tell_other_hosts()

    def _tell_other_hosts(self) -> None:
        """Sends the board to the other hosts, before this process may end."""
        if self._watch is not None:
            self._watch.flush()

    def close(self) -> None:
        """Ends the process groups of lanes and callers. The lanes must be idle. Writers of checkpoints end their own groups."""
        if self._device_watch is not None:
            self._device_watch.close()
            self._device_watch = None
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self.board is not None:
            self.board.close()
            self.board = None
        self.exchanges.close()
        for group in self._own_groups:
            self.end_group(group)


def _soon(done: Callable[[], bool]) -> bool:
    """True if `done` becomes true within `_ARRIVING_S`."""
    limit = time.monotonic() + _ARRIVING_S
    while not done():
        if time.monotonic() > limit:
            return False
        time.sleep(_LONGEST_S)
    return True


def connect(device: torch.device, timeout_s: float | None, peer_copies: bool | None = None, mesh: Rows | None = None,
            sequence_ranks: int = 1) -> Ranks:
    """Connects the processes of torch.distributed's default group. `peer_copies`: as in `StreamConfig`; `mesh`: as in
    `arranged`; `sequence_ranks`: as in `Ranks`. Raises what `Ranks` and `Exchanges.connect` raise, and `RankError`."""
    ranks = Ranks(device, timeout_s, mesh, sequence_ranks)
    ranks.connect_host()
    ranks.exchanges.connect(peer_copies, lambda yes: all(ranks.agree("stream", yes)))
    if sequence_ranks > 1:  # NCCL connects in its first collective
        ranks.sequence.all_to_all(torch.zeros(sequence_ranks, device=device))
    return ranks


def _written(value: Any) -> bytes:
    """A value as bytes that `_read` reads. Does not use pickle."""
    written = io.BytesIO()
    torch.save(value, written)
    return written.getvalue()


def _read(data: Any) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)
