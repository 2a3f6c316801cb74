"""Says how each process of a job is: a row of shared memory for each rank, which only that rank writes.

A process that was killed cannot say so. Its end is seen by its process descriptor (`pidfd_open`).
"""
from __future__ import annotations

import os
import select

import torch
from torch import Tensor

from megacompile.errors import first_line

#: Bytes of a row: four int64, then the text of an error.
ROW_BYTES = 4096
_TEXT = 32


class StatusBoard:
    """`memory`: uint8 [ranks * ROW_BYTES], zeros, shared. State: descriptors of the other ranks' processes.

    A row: how many updates the rank's lanes have finished, how often the rank has failed, the length of its last error's text,
    how many agreements the rank has reached.
    Errors that all ranks have, such as a batch that no rank can take, do not divide them: a rank is in trouble only if it has
    failed more often than this one."""

    def __init__(self, memory: Tensor, rank: int, processes: list[int]) -> None:
        self.rank, self.processes = rank, processes
        self._rows = memory.view(len(processes), ROW_BYTES)
        self._numbers = [row[:_TEXT].view(torch.int64) for row in self._rows]
        self._descriptors = {other: os.pidfd_open(process) for other, process in enumerate(processes) if other != rank}

    def trouble(self, failures: bool = True) -> str:
        """What has happened to another rank, or "". Without `failures`: only if its process cannot go on."""
        own = int(self._numbers[self.rank][1])
        for other in self._descriptors if failures else ():
            _, failed, length, _ = self._numbers[other].tolist()
            if failed > own:
                text = bytes(self._rows[other][_TEXT:_TEXT + length].tolist()).decode(errors="replace")
                return f"rank {other} has failed with {text}"
        for other, descriptor in list(self._descriptors.items()):
            if select.select([descriptor], [], [], 0)[0]:
                return f"rank {other} (process {self.processes[other]}) has ended"
            if self._stopped(self.processes[other]):
                return f"rank {other} (process {self.processes[other]}) was stopped by a signal"
        return ""

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
        row[_TEXT:_TEXT + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        numbers[2] = len(text)
        numbers[1] += 1

    def reached(self) -> None:
        """This rank has reached one more agreement."""
        self._numbers[self.rank][3] += 1

    def behind(self) -> str:
        """The ranks that have not reached this rank's agreement yet, for a message."""
        here = int(self._numbers[self.rank][3])
        late = [str(rank) for rank, numbers in enumerate(self._numbers) if int(numbers[3]) < here]
        return f" for rank {', '.join(late)}" if late else ""

    def finished(self, updates: int) -> None:
        """This rank's lanes have finished so many updates."""
        self._numbers[self.rank][0] = updates

    def all_finished(self, updates: int) -> bool:
        """Whether every rank has finished so many updates."""
        return all(int(numbers[0]) >= updates for numbers in self._numbers)

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
