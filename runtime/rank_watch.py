"""Finds out when another rank has ended or stalled, and ends this one in bounded time."""
from __future__ import annotations

import atexit
import faulthandler
import functools
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType

from torch import Tensor

from megacompile.errors import RankError, first_line
from megacompile.runtime.hosts import Hosts

# -------------------- Says how each process of a job is: a row of shared memory for each rank, which only that rank writes
#
# A process that was killed cannot say so. On its own host its end is seen by its process descriptor (`pidfd_open`). The rows of
# ranks on other hosts are copies, which one process of the host keeps up to date (`runtime/rank_watch.py`).
#: Bytes of a row: five int64, then the text of an error. Hosts tell each other the first bytes of each row.
ROW_BYTES, TOLD_BYTES = 4096, 256
_TEXT, _NUMBER = 40, 8
_FINISHED, _FAILED, _LENGTH, _REACHED, _GONE = range(5)
#: States of a process that cannot go on.
ENDED, STOPPED, SILENT = 1, 2, 3
_WORDS = {ENDED: "has ended", STOPPED: "was stopped by a signal",
          SILENT: "has stopped answering (it, its machine or the network is down)"}


class StatusBoard:
    """The state of all ranks, in memory that the ranks of a host share. `memory`: uint8 [ranks * ROW_BYTES], zeros, shared by
    the ranks `here` (all, if none is given). `processes`: of all ranks. `where(rank)`: the rank's host, for a message. State:
    descriptors of the other ranks' processes on this host.

    Threads that live until the interpreter ends use the board, so it is read and written without PyTorch. PyTorch's operations
    release the interpreter's lock, and a thread that cannot get it back then aborts the process.

    A row: how many updates the rank's lanes have finished, how often the rank has failed, the length of its last error's text,
    how many agreements the rank has reached, and the state of its process according to its host (0: unknown). Errors that all
    ranks have, such as a batch that no rank can take, leave them in step: a rank is in trouble only if it has failed more often
    than this one."""

    def __init__(self, memory: Tensor, rank: int, processes: list[int], here: Collection[int] = (),
                 where: Callable[[int], str] = lambda rank: "") -> None:
        self.rank, self.processes, self._where = rank, processes, where
        self._here = tuple(here) or tuple(range(len(processes)))
        self._bytes = memory.numpy().data.cast("B")  # keeps the memory
        rows = [self._bytes[start:start + ROW_BYTES] for start in range(0, len(processes) * ROW_BYTES, ROW_BYTES)]
        self._rows, self._numbers = rows, [row[:_TEXT].cast("q") for row in rows]
        self._descriptors: dict[int, int] = {}
        for other in self._here:
            if other != rank:
                try:
                    self._descriptors[other] = os.pidfd_open(processes[other])
                except ProcessLookupError:
                    self.close()
                    raise RankError(f"rank {other} (process {processes[other]}){where(other)} has ended before training "
                                    "began: its output says why") from None

    def trouble(self, failures: bool = True) -> str:
        """The trouble of another rank as text, or "". Without `failures`: only if its process cannot go on."""
        own = self._numbers[self.rank][_FAILED]
        others = [other for other in range(len(self.processes)) if other != self.rank]
        gone = next(((other, gone) for other in others if (gone := self._gone(other))), None)
        for other in others if failures else ():  # read after `gone`, so that what an ended rank said is there
            _, failed, length, *_ = self._numbers[other].tolist()
            if failed > own:
                text = bytes(self._rows[other][_TEXT:_TEXT + length]).rstrip(b"\0").decode(errors="replace")
                return f"rank {other}{self._where(other)} has failed with {text}"
        if gone is not None:
            other, state = gone
            return f"rank {other} (process {self.processes[other]}){self._where(other)} {_WORDS[state]}"
        return ""

    def _gone(self, rank: int) -> int:
        """The state of another rank's process if it cannot go on; 0 if nothing is known."""
        descriptor = self._descriptors.get(rank)
        if descriptor is None:
            return self._numbers[rank][_GONE]
        ended = select.poll()  # `select.select` takes no descriptor above 1023
        ended.register(descriptor, select.POLLIN)
        if any(event & select.POLLIN for _, event in ended.poll(0)):
            return ENDED
        return STOPPED if self._stopped(self.processes[rank]) else 0

    @staticmethod
    def _stopped(process: int) -> bool:
        try:
            with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
                return file.read().rpartition(")")[2].split()[0] in ("T", "t")
        except OSError:
            return False  # it has just ended, which its descriptor shows

    def fail(self, error: BaseException) -> None:
        """Tells the others that this rank has failed."""
        text = f"{type(error).__name__}: {first_line(error)}".encode()[:ROW_BYTES - _TEXT]
        row, numbers = self._rows[self.rank], self._numbers[self.rank]
        row[_TEXT:_TEXT + len(text)] = text
        numbers[_LENGTH] = len(text)
        numbers[_FAILED] += 1

    def reached(self) -> None:
        """Records that this rank has reached one more agreement."""
        self._numbers[self.rank][_REACHED] += 1

    def late_ranks(self) -> str:
        """The ranks that have not reached this rank's agreement yet, for a message."""
        here = self._numbers[self.rank][_REACHED]
        late = [f"{rank}{self._where(rank)}" for rank, numbers in enumerate(self._numbers) if numbers[_REACHED] < here]
        return f" for rank {', '.join(late)}" if late else ""

    def finished(self, updates: int) -> None:
        """Records how many updates this rank's lanes have finished."""
        self._numbers[self.rank][_FINISHED] = updates

    def all_finished(self, updates: int) -> bool:
        """True if every rank of this host has finished at least this many updates."""
        return all(self._numbers[rank][_FINISHED] >= updates for rank in self._here)

    # ---------------------------------------------------------------- between hosts
    def told(self) -> bytes:
        """The message between hosts: the first `TOLD_BYTES` of each row. The rows of this host include the state of their
        processes."""
        for other in self._descriptors:
            self.mark(other, self._gone(other))
        return b"".join(row[:TOLD_BYTES] for row in self._rows)

    def take(self, told: bytes, ranks: Sequence[int]) -> bool:
        """Copies the rows of some ranks of another host from that host's message. Returns whether there is new trouble."""
        trouble = False
        for rank in ranks:
            row, here = told[rank * TOLD_BYTES:(rank + 1) * TOLD_BYTES], self._numbers[rank]
            numbers = memoryview(row)[:_TEXT].cast("q")
            trouble |= numbers[_FAILED] > here[_FAILED] or bool(numbers[_GONE] and not here[_GONE])
            self._rows[rank][_TEXT:TOLD_BYTES] = row[_TEXT:]  # before the number that makes others read it
            self._rows[rank][:_GONE * _NUMBER] = row[:_GONE * _NUMBER]
            self.mark(rank, numbers[_GONE])
        return trouble

    def mark(self, rank: int, gone: int) -> None:
        """Records the state of a process, unless one is already recorded."""
        if gone and not self._numbers[rank][_GONE]:
            self._numbers[rank][_GONE] = gone

    def any_gone(self) -> bool:
        """True if any rank is recorded as unable to go on."""
        return any(numbers[_GONE] for numbers in self._numbers)

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


# --------------------
# Tells the ranks of each host how those of the other hosts are: a small thread in the first rank of each host.
#
#     host node0: rank 0  <--->  host node1: rank 2          each second, and at once when a rank is in trouble
#                         <--->  host node2: rank 4
#
# The first rank of the first host collects the messages of all hosts and forwards them. A host's message is copied to the board
# of this one (`StatusBoard`), where every wait looks. A process that ends closes its connection. One that is stopped, or whose
# machine or network is down, is silent: after `SILENCE_S` it counts as gone.
#: Seconds between two messages of a host, and the longest silence of a host. Together with the time that a process takes to
#: end, this is less than half a minute.
PERIOD_S, SILENCE_S = 1.0, 20.0
#: Seconds that a rank waits until its message was sent.
_FLUSH_S = 2.0
#: A message begins with one of these, in eight bytes.
_OPEN, _CLOSED = (state.to_bytes(8, "little") for state in (0, 1))


@dataclass
class _Peer:
    """A rank that this process talks to. `outgoing`, `incoming`: parts of messages. `heard`: the time of its last message.
    `closed`: it has closed its model, and sends nothing more. `lost`: the connection is lost."""

    rank: int
    connection: socket.socket
    outgoing: bytes = b""
    incoming: bytearray = field(default_factory=bytearray)
    heard: float = field(default_factory=time.monotonic)
    closed: bool = False
    lost: bool = False


class HostWatch:
    """Exchanges messages with other hosts. `connections`: to each rank that this process talks to. State: the peers, how many
    rounds of messages were begun, and whether it was asked to close, and has closed."""

    def __init__(self, board: StatusBoard, hosts: Hosts, connections: Mapping[int, socket.socket]) -> None:
        self.board, self.hosts = board, hosts
        self.peers = [_Peer(rank, connection) for rank, connection in connections.items()]
        self._message_bytes = len(_OPEN) + len(board.told())
        self._rounds, self._closing, self._closed = 0, False, False
        self._changed = threading.Condition()
        self._asked, self._ask = socket.socketpair()  # wakes the thread
        self._asked.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._asked, selectors.EVENT_READ)
        for peer in self.peers:
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        self._thread = threading.Thread(target=self._run, name="megacompile hosts", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Sends the current board to the other hosts. Returns when that was sent, or after a while."""
        with self._changed:
            wanted, limit = self._rounds + 2, time.monotonic() + _FLUSH_S  # a round that has begun may have looked before
            while self._thread.is_alive() and time.monotonic() < limit and (
                    self._rounds < wanted or any(peer.outgoing for peer in self.peers if not peer.lost)):
                self._ask.send(b"!")
                self._changed.wait(0.02)

    def close(self) -> None:
        """Tells the other hosts that this model is closed. The board is not read any more. The thread and the connections stay
        until the others have closed the model too. If this process ends earlier, they must notice."""
        with self._changed:
            self._closing = True
            self._ask.send(b"!")
            self._changed.wait_for(lambda: self._closed, _FLUSH_S)

    # ---------------------------------------------------------------- in the thread
    def _run(self) -> None:
        begun = 0.0  # when the last round of messages began
        while not (self._closed and all(peer.lost or (peer.closed and not peer.outgoing) for peer in self.peers)):
            looked = time.monotonic()  # what was there then has been read below, though this thread may be late
            for key, events in self._selector.select(max(0.0, begun + PERIOD_S - time.monotonic())):
                if key.data is None:
                    begun = 0.0
                    self._asked.recv(4096)
                    continue
                if events & selectors.EVENT_READ and self._take(key.data):
                    begun = 0.0  # the other hosts should know at once
                if events & selectors.EVENT_WRITE and not key.data.lost:
                    self._put(key.data)
            for peer in self.peers:
                if not (self._closed or peer.closed or peer.lost) and looked - peer.heard > SILENCE_S:
                    self._lose(peer, SILENT)
            now = time.monotonic()
            if now - begun >= PERIOD_S:
                begun = now
                self._tell()
        for peer in self.peers:
            peer.connection.close()

    def _tell(self) -> None:
        """Begins a round: sends the board to every peer that has taken the previous message. Does nothing once this is
        closed."""
        if self._closed:
            return
        closing = self._closing
        message = (_CLOSED if closing else _OPEN) + self.board.told()
        for peer in self.peers:
            if not peer.lost and (closing or not peer.outgoing):
                peer.outgoing += message
                self._put(peer)
        with self._changed:
            self._rounds, self._closed = self._rounds + 1, closing
            self._changed.notify_all()

    def _put(self, peer: _Peer) -> None:
        """Sends as much as the connection accepts."""
        try:
            while peer.outgoing:
                peer.outgoing = peer.outgoing[peer.connection.send(peer.outgoing):]
        except BlockingIOError:
            pass
        except OSError:
            self._lose(peer, ENDED)
            return
        self._selector.modify(peer.connection, selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outgoing else 0), peer)

    def _take(self, peer: _Peer) -> bool:
        """Reads a peer's messages. Returns whether there is new trouble."""
        try:
            data = peer.connection.recv(1 << 20)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._lose(peer, ENDED)
            return True
        peer.heard = time.monotonic()
        peer.incoming += data
        trouble = False
        while len(peer.incoming) >= self._message_bytes:
            message = bytes(peer.incoming[:self._message_bytes])
            del peer.incoming[:self._message_bytes]
            peer.closed |= message[:len(_OPEN)] == _CLOSED
            trouble |= not self._closed and self.board.take(message[len(_OPEN):], self._told_of_by(peer.rank))
        return trouble

    def _told_of_by(self, peer: int) -> list[int]:
        """The ranks that a peer reports on: those of its host, or of all other hosts if it is the first rank of all."""
        hosts = self.hosts.ranks_by_host
        told_of = hosts if peer == hosts[0][0] else [hosts[self.hosts.host_of(peer)]]
        return [rank for each in told_of if self.hosts.rank not in each for rank in each]

    def _lose(self, peer: _Peer, gone: int) -> None:
        """Marks the connection to a peer as lost. The peer may have ended because of another rank, which it has reported."""
        peer.lost = True
        self._selector.unregister(peer.connection)
        if not self.board.any_gone():
            self.board.mark(peer.rank, gone)


# -------------------- Ends a process whose caller waits inside CUDA for a rank that has ended
#
# Waits on the host look at the board and raise `RankError`. A caller that reads `loss.item()`, or copies a batch to the device,
# waits inside CUDA for an exchange with the other rank's device. No error can be raised there, so a thread prints the error
# with the caller's place and ends the process. All of this must be so at several looks in a row:
#
# - Another rank's process has ended or was stopped. A rank that has failed and still runs may have a checkpoint to complete.
# - The caller's thread stands at the same place: it is inside one call, or in a loop around one.
# - The device has an exchange to finish. It has none in a rank that evaluates or saves alone after the others have finished.
#: Seconds between two looks of the thread, and the number of consecutive looks at which a caller may stand still. Less than
#: half a minute passes from the other rank's end to the end of this process. Looks are counted instead of seconds, so that the
#: time in which a job is stopped does not count.
DEVICE_PERIOD_S, LOOKS = 1.0, 8
#: The looks for a caller that an error has told: it may upload logs, or read a loss that never comes.
LOOKS_IF_TOLD = 300
#: Seconds that the device may take to answer whether it has exchanges to finish.
_ANSWER_S = 5.0


class DeviceWatch:
    """Ends this process if its caller waits inside CUDA for a rank that has ended. `trouble()`: what has happened to another
    rank's process, or "". `busy()`: whether the device has exchanges to finish. `caller()`: the identifier of the thread that
    calls the model. `told()`: whether an error has told that thread that the ranks cannot go on. `end`: what to do with the
    cause. State: the caller's position at the last look, and for how many looks it has not moved."""

    def __init__(self, trouble: Callable[[], str], busy: Callable[[], bool], caller: Callable[[], int],
                 told: Callable[[], bool], end: Callable[[str, int], None] | None = None) -> None:
        self._trouble, self._busy, self._caller, self._told = trouble, busy, caller, told
        self._end = end or end_process
        self._stood: list[tuple[CodeType, int]] = []
        self._looks = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="megacompile device watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. Afterwards it calls nothing. The thread itself may close it, if it collects a forgotten model."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def look(self) -> str:
        """What has happened to another rank, if the caller has waited for it long enough; else ""."""
        cause, stands = self._trouble(), self._stack_position()
        self._looks = self._looks + 1 if cause and stands == self._stood else 0
        self._stood = stands
        enough = self._looks >= (LOOKS_IF_TOLD if self._told() else LOOKS)
        return cause if enough and self._is_busy() else ""

    def _stack_position(self) -> list[tuple[CodeType, int]]:
        """The caller's position: the code and the instruction of each of its frames."""
        frame = sys._current_frames().get(self._caller())
        return [] if frame is None else [(each.f_code, each.f_lasti) for each, _ in traceback.walk_stack(frame)]

    def _is_busy(self) -> bool:
        # If the caller's call keeps CUDA from answering, nothing in Python can run any more: then C ends the process.
        faulthandler.dump_traceback_later(_ANSWER_S, exit=True, file=sys.__stderr__ or 2)
        busy = self._busy()
        faulthandler.cancel_dump_traceback_later()
        return busy

    def _run(self) -> None:
        while not self._closed.wait(DEVICE_PERIOD_S):
            if (cause := self.look()) and not self._closed.is_set():
                self._end(cause, self._caller())
                return


def end_process(cause: str, caller: int) -> None:
    """Prints the position of the caller's thread and the cause, and ends this process with code 1."""
    try:
        frame = sys._current_frames().get(caller)
        place = "" if frame is None else "".join(traceback.format_stack(frame))
        sys.stdout.flush()
        print(f"This process waits for the device:\n{place}megacompile.errors.RankError: {cause}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)  # the interpreter's own end would wait for the device, too


# -------------------- Limits how long this process takes to exit once another rank has ended
#
# Its GPU may wait for that rank forever, and the destructors of CUDA and NCCL wait for the GPU. Python's threads do not run
# then, so the kernel ends the process.
#: Seconds from the end of the script. With the time until a rank is seen to have ended, this is less than half a minute.
LIMIT_S = 15.0


@functools.cache
def limit_exit(seconds: float = LIMIT_S) -> None:
    """Makes this process end at most this many seconds after its script: by itself, or by SIGALRM."""
    atexit.register(_limit, seconds)


def _limit(seconds: float) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
