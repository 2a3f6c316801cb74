"""How callers exchange short values: through shared memory on a host, and by the first rank of each host between hosts.

A value goes through a mailbox of its host. The first rank of each host sends its host's values to the others and leaves the
values of all hosts in a second mailbox. No rank but the first of a host waits for a network.
"""
from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megacompile.compat.distributed import all_gather
from megacompile.runtime.hosts import Hosts
from megacompile.system.mailbox import LETTER_BYTES, MOST_BYTES, RANK_BYTES, Mailbox
from megacompile.system.shared_memory import SharedMemory

_SIZE = struct.Struct("<q")
#: Bytes of a rank's value between hosts: its size, and the value.
_ENTRY_BYTES = LETTER_BYTES
assert _SIZE.size + MOST_BYTES <= _ENTRY_BYTES

#: (bytes of a rank's value, the value if it is not too long).
Letter = tuple[int, bytes]


def _answer_bytes(hosts: Hosts) -> int:
    """Bytes of a letter that holds the values of all ranks."""
    return hosts.count * hosts.ranks * _ENTRY_BYTES + LETTER_BYTES


def pieces(hosts: Hosts) -> dict[str, int]:
    """Bytes of the shared memory that `Letters` need, by piece."""
    return {"mailbox": RANK_BYTES * hosts.ranks} | ({"answers": 2 * _answer_bytes(hosts)} if hosts.count > 1 else {})


class Letters:
    """`memory`: with the `pieces`. `leaders`: a group of the first ranks of all hosts, in this process if it is one of them.
    `wait(poll)` returns what `poll` returns once that is not None; `finish(work)` waits for a collective. Both raise
    `RankError`."""

    def __init__(self, hosts: Hosts, memory: SharedMemory, leaders: dist.ProcessGroup | None,
                 wait: Callable[[Callable[[], list[Letter] | None]], list[Letter]], finish: Callable[[Any], None]) -> None:
        self._hosts, self._leaders, self._wait, self._finish = hosts, leaders, wait, finish
        self._box = Mailbox(memory.piece("mailbox"), hosts.local)
        if hosts.count > 1:
            self._answers = Mailbox(memory.piece("answers"), 0 if hosts.leads else None, _answer_bytes(hosts))

    def exchanged(self, value: bytes) -> list[bytes] | None:
        """The values of all ranks, in their order; None if one of them is too long. Raises `RankError`."""
        self._box.put(value)
        letters = self._wait(self._box.all)
        if self._hosts.count > 1:
            letters = self._of_all_hosts(letters)
        if max(size for size, _ in letters) > MOST_BYTES:
            return None
        return [told for _, told in letters]

    def _of_all_hosts(self, letters: list[Letter]) -> list[Letter]:
        """The letters of all ranks in their order, from those of this host."""
        if self._hosts.leads:
            own = torch.frombuffer(bytearray(_packed(letters)), dtype=torch.uint8)
            received = torch.empty(self._hosts.count * own.numel(), dtype=torch.uint8)
            assert self._leaders is not None, "the first rank of a host without the group of those"
            self._finish(all_gather(received, own, self._leaders, wait=False))
            self._answers.put(received.numpy().tobytes())
        else:
            self._answers.begin()
        ((_, answer),) = self._wait(self._answers.all)
        found = _unpacked(answer)
        ranks = [rank for row in self._hosts.rows for rank in row]
        return [letter for _, letter in sorted(zip(ranks, found, strict=True))]


def _packed(letters: list[Letter]) -> bytes:
    return b"".join((_SIZE.pack(size) + told).ljust(_ENTRY_BYTES, b"\0") for size, told in letters)


def _unpacked(data: bytes) -> list[Letter]:
    found = []
    for start in range(0, len(data), _ENTRY_BYTES):
        (size,) = _SIZE.unpack_from(data, start)
        begin = start + _SIZE.size
        found.append((size, data[begin:begin + (size if size <= MOST_BYTES else 0)]))
    return found
