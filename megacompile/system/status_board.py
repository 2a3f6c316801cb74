"""Says how each process of a job is: a row of shared memory for each rank, which only that rank writes.

A process that was killed cannot say so. On its own host its end is seen by its process descriptor (`pidfd_open`). The rows of
ranks on other hosts are copies, which one process of the host keeps up to date (`runtime/host_watch.py`).
"""
from __future__ import annotations

import os
import select
from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from megacompile.errors import RankError, first_line

#: Bytes of a row: five int64, then the text of an error. Hosts tell each other the first bytes of each row.
ROW_BYTES, TOLD_BYTES = 4096, 256
_TEXT, _NUMBER = 40, 8
_FINISHED, _FAILED, _LENGTH, _REACHED, _GONE = range(5)
#: What has become of a process that cannot go on.
ENDED, STOPPED, SILENT = 1, 2, 3
_WORDS = {ENDED: "has ended", STOPPED: "was stopped by a signal",
          SILENT: "has stopped answering (it, its machine or the network is down)"}


class StatusBoard:
    """`memory`: uint8 [ranks * ROW_BYTES], zeros, shared by the ranks `here` (all, if none is given). `processes`: those of all
    ranks. `where(rank)`: the rank's host for a message. State: descriptors of the other ranks' processes on this host.

    Threads that live until the interpreter ends use the board, so it is read and written without PyTorch: its operations
    release the interpreter's lock, and a thread that then cannot get it back ends the process with an abort.

    A row: how many updates the rank's lanes have finished, how often the rank has failed, the length of its last error's text,
    how many agreements the rank has reached, and what its host says has become of its process (0: nothing).
    Errors that all ranks have, such as a batch that no rank can take, do not divide them: a rank is in trouble only if it has
    failed more often than this one."""

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
        """What has happened to another rank, or "". Without `failures`: only if its process cannot go on."""
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
        """What has become of another rank's process that cannot go on; 0: nothing that is known."""
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
        """This rank has reached one more agreement."""
        self._numbers[self.rank][_REACHED] += 1

    def late_ranks(self) -> str:
        """The ranks that have not reached this rank's agreement yet, for a message."""
        here = self._numbers[self.rank][_REACHED]
        late = [f"{rank}{self._where(rank)}" for rank, numbers in enumerate(self._numbers) if numbers[_REACHED] < here]
        return f" for rank {', '.join(late)}" if late else ""

    def finished(self, updates: int) -> None:
        """This rank's lanes have finished so many updates."""
        self._numbers[self.rank][_FINISHED] = updates

    def all_finished(self, updates: int) -> bool:
        """Whether every rank of this host has finished so many updates."""
        return all(self._numbers[rank][_FINISHED] >= updates for rank in self._here)

    # ---------------------------------------------------------------- between hosts
    def told(self) -> bytes:
        """What hosts tell each other: the first `TOLD_BYTES` of each row. The rows of this host say what has become of their
        processes."""
        for other in self._descriptors:
            self.mark(other, self._gone(other))
        return b"".join(row[:TOLD_BYTES] for row in self._rows)

    def take(self, told: bytes, ranks: Sequence[int]) -> bool:
        """Copies the rows of some ranks of another host from what that host has told. Whether there is new trouble."""
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
        """Notes what has become of a process, unless something is known already."""
        if gone and not self._numbers[rank][_GONE]:
            self._numbers[rank][_GONE] = gone

    def any_gone(self) -> bool:
        """Whether any rank is noted as one that cannot go on."""
        return any(numbers[_GONE] for numbers in self._numbers)

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
