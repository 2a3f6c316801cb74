"""Messages between ranks: on one host through shared memory, between hosts through connections."""
from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megacompile.compat.distributed import all_gather
from megacompile.errors import RankError
from megacompile.runtime.hosts import Hosts
from megacompile.system.host_memory import SharedMemory

# -------------------- Values that the processes of a job exchange through shared memory, without threads and sockets
#
# Each rank has two letters, which only that rank writes: one for odd rounds, one for even ones. A rank begins a round once all
# ranks have begun the one before it, and they have then read the letters of the round before that one.
#: Bytes of a letter, and of the memory of a rank.
LETTER_BYTES = 4096
RANK_BYTES = 2 * LETTER_BYTES
_HEAD = struct.Struct("<qqI")  # round, bytes of the value, checksum of what was written
#: The longest value in a letter of `LETTER_BYTES`.
MOST_BYTES = LETTER_BYTES - _HEAD.size


class Mailbox:
    """`memory`: uint8 [ranks * 2 * letter_bytes], zeros, shared. `rank`: this process; None: a process that only reads. State:
    how many rounds this process has begun."""

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
        """Begins a round with this rank's value. If the value is too long, puts only its size."""
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
        """The result of `get` for each rank; None if one of them has not begun this round."""
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


# -------------------- TCP connections between the first process of a job and one process of each other host
#
# The first process listens for a moment and tells the others its port and a token through a channel that they have already. A
# connection that does not begin with the token is closed.
_TOKEN_BYTES = 32
_NUMBER = struct.Struct("<q")
#: The listener's answer to the right token.
_WELCOME = b"megacompile"
#: Seconds that connecting may take, and the answer to a token.
_CONNECT_S, _ANSWER_S = 60.0, 10.0

#: Port and token of a listener, the token in hexadecimal.
Door = tuple[int, str]


class Listener:
    """Waits for connections on all addresses of this machine."""

    def __init__(self) -> None:
        """Raises `RankError` if this process cannot listen."""
        try:
            dual = socket.has_dualstack_ipv6()
            self._socket = socket.create_server(("", 0), family=socket.AF_INET6 if dual else socket.AF_INET,
                                                dualstack_ipv6=dual)
        except OSError as error:
            raise RankError(f"this process cannot accept connections from other hosts ({error.strerror}): allow it to listen "
                            "on a port") from error
        self.door: Door = self._socket.getsockname()[1], secrets.token_hex(_TOKEN_BYTES)

    def accepted(self, count: int) -> dict[int, socket.socket]:
        """The connections of `count` processes, by the number that each sends. Ends listening. Raises `RankError` if one does
        not come in time."""
        found: dict[int, socket.socket] = {}
        limit = time.monotonic() + _CONNECT_S
        with self._socket:
            while len(found) < count:
                self._socket.settimeout(max(0.0, limit - time.monotonic()))
                try:
                    connection, _ = self._socket.accept()
                except OSError as error:
                    raise RankError(f"{count - len(found)} of {count} other hosts have not connected to rank 0: let their "
                                    "processes reach any port of this machine") from error
                if (number := self._number_of(connection)) is None:
                    connection.close()
                else:
                    found[number] = connection
        return found

    def _number_of(self, connection: socket.socket) -> int | None:
        """The number that a process sends after the token; None for another token."""
        with contextlib.suppress(OSError):
            connection.settimeout(_ANSWER_S)
            given = _received(connection, _TOKEN_BYTES + _NUMBER.size)
            if hmac.compare_digest(given[:_TOKEN_BYTES], bytes.fromhex(self.door[1])):
                connection.sendall(_WELCOME)
                _make_ready(connection)
                return int(_NUMBER.unpack(given[_TOKEN_BYTES:])[0])
        return None


def connected(addresses: Sequence[str], door: Door, number: int) -> socket.socket:
    """A connection to the process that listens at one of these addresses. `number`: which process this one is. Raises
    `RankError`."""
    port, token = door
    reasons = []
    for address in addresses:
        try:
            connection = socket.create_connection((address, port), timeout=_ANSWER_S)
            connection.sendall(bytes.fromhex(token) + _NUMBER.pack(number))
            if _received(connection, len(_WELCOME)) == _WELCOME:
                _make_ready(connection)
                return connection
            connection.close()
        except OSError as error:
            reasons.append(f"{address}: {error.strerror or error}")
    raise RankError(f"port {port} of rank 0 cannot be reached from this host ({'; '.join(reasons)}): let the processes of all "
                    "hosts reach each other's ports, and set MASTER_ADDR to the address of rank 0's machine")


def _received(connection: socket.socket, count: int) -> bytes:
    """Receives exactly `count` bytes. Raises `OSError` if the connection ends earlier."""
    found = b""
    while len(found) < count:
        if not (part := connection.recv(count - len(found))):
            raise ConnectionError("the connection was closed")
        found += part
    return found


def _make_ready(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


# --------------------
# Callers exchange short values through shared memory on a host, and by the first rank of each host between hosts.
#
# A value goes through a mailbox of its host. The first rank of each host sends its host's values to the others and leaves the
# values of all hosts in a second mailbox. No rank but the first of a host waits for a network.
_SIZE = struct.Struct("<q")
#: Bytes of a rank's value between hosts: its size, and the value.
_ENTRY_BYTES = LETTER_BYTES
assert _SIZE.size + MOST_BYTES <= _ENTRY_BYTES

#: (bytes of a rank's value, the value if it is not too long).
Letter = tuple[int, bytes]


def _answer_bytes(hosts: Hosts) -> int:
    """Bytes of a letter that holds the values of all ranks."""
    return hosts.count * len(hosts.here) * _ENTRY_BYTES + LETTER_BYTES


def pieces(hosts: Hosts) -> dict[str, int]:
    """The sizes in bytes of the pieces of shared memory that `Letters` needs."""
    return {"mailbox": RANK_BYTES * len(hosts.here)} | ({"answers": 2 * _answer_bytes(hosts)} if hosts.count > 1 else {})


class Letters:
    """`memory`: has the `pieces`. `leaders`: a group of the first ranks of all hosts, if this process is one of them.
    `wait(poll)` returns the result of `poll` once that is not None. `finish(work)` waits for a collective. Both raise
    `RankError`."""

    def __init__(self, hosts: Hosts, memory: SharedMemory, leaders: dist.ProcessGroup | None,
                 wait: Callable[[Callable[[], list[Letter] | None]], list[Letter]], finish: Callable[[Any], None]) -> None:
        self._hosts, self._leaders, self._wait, self._finish = hosts, leaders, wait, finish
        self._box = Mailbox(memory.piece("mailbox"), hosts.seat)
        if hosts.count > 1:
            self._answers = Mailbox(memory.piece("answers"), 0 if hosts.leads else None, _answer_bytes(hosts))

    def exchanged(self, value: bytes) -> list[bytes] | None:
        """The values of all ranks, in rank order; None if one of them is too long. Raises `RankError`."""
        self._box.put(value)
        letters = self._wait(self._box.all)
        if self._hosts.count > 1:
            letters = self._of_all_hosts(letters)
        if max(size for size, _ in letters) > MOST_BYTES:
            return None
        return [told for _, told in letters]

    def _of_all_hosts(self, letters: list[Letter]) -> list[Letter]:
        """The letters of all ranks in rank order, given those of this host."""
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
        ranks = [rank for each in self._hosts.ranks_by_host for rank in each]
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
