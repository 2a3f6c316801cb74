"""Values that the processes of a job exchange through shared memory, without threads and sockets.

Each rank has two letters, which only that rank writes: one for odd rounds, one for even ones. A rank begins a round once all
ranks have begun the one before it, and they have then read the letters of the round before that one.
"""
from __future__ import annotations

import struct
import zlib

from torch import Tensor

#: Bytes of a letter, and of the memory of a rank.
LETTER_BYTES = 4096
RANK_BYTES = 2 * LETTER_BYTES
_HEAD = struct.Struct("<qqI")  # round, bytes of the value, checksum of what was written
#: The longest value in a letter of `LETTER_BYTES`.
MOST_BYTES = LETTER_BYTES - _HEAD.size


class Mailbox:
    """`memory`: uint8 [ranks * 2 * letter_bytes], zeros, shared. `rank`: this process; None: one that only reads. State: how
    many rounds this process has begun."""

    def __init__(self, memory: Tensor, rank: int | None, letter_bytes: int = LETTER_BYTES) -> None:
        self.rank, self.letter_bytes, self._round = rank, letter_bytes, 0
        self._bytes = memory.numpy().data.cast("B")  # keeps the memory
        self._ranks = memory.numel() // (2 * letter_bytes)

    @property
    def most_bytes(self) -> int:
        """The longest value, in bytes."""
        return self.letter_bytes - _HEAD.size

    def begin(self) -> None:
        """Begins a round without a value of this process."""
        self._round += 1

    def put(self, value: bytes) -> None:
        """Begins a round with this rank's value. Only the size of a value that is too long is told."""
        assert self.rank is not None, "a reader puts nothing"
        self.begin()
        told = value if len(value) <= self.most_bytes else b""
        start = self._start(self.rank)
        self._bytes[start + _HEAD.size:start + _HEAD.size + len(told)] = told
        self._bytes[start:start + _HEAD.size] = _HEAD.pack(self._round, len(value), self._checksum(len(value), told))

    def get(self, rank: int) -> tuple[int, bytes] | None:
        """(bytes of another rank's value, the value if it is not too long); None if the rank has not begun this round."""
        start = self._start(rank)
        number, size, checksum = _HEAD.unpack(self._bytes[start:start + _HEAD.size])
        if number != self._round:
            return None
        told = bytes(self._bytes[start + _HEAD.size:start + _HEAD.size + (size if size <= self.most_bytes else 0)])
        # Some processors show another one's writes in another order.
        return (size, told) if checksum == self._checksum(size, told) else None

    def all(self) -> list[tuple[int, bytes]] | None:
        """What `get` returns for each rank; None if one of them has not begun this round."""
        found = []
        for rank in range(self._ranks):
            if (letter := self.get(rank)) is None:
                return None
            found.append(letter)
        return found

    def _start(self, rank: int) -> int:
        return (2 * rank + self._round % 2) * self.letter_bytes

    def _checksum(self, size: int, told: bytes) -> int:
        return zlib.crc32(told, zlib.crc32(struct.pack("<qq", self._round, size)))
