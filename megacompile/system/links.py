"""TCP connections between the first process of a job and one process of each other host.

The first process listens for a moment and tells the others its port and a token through a channel that they have already. A
connection that does not begin with the token is closed.
"""
from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Sequence

from megacompile.errors import RankError

_TOKEN_BYTES = 32
_NUMBER = struct.Struct("<q")
#: What the listener answers to the right token.
_WELCOME = b"megacompile"
#: How long connecting may take, and the answer to a token, in seconds.
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
        """The connections of `count` processes, by the number that each gives. Ends listening. Raises `RankError` if one does
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
        """The number that a process gives after the token; None for another token."""
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
    """So many bytes. Raises `OSError` if the connection ends before."""
    found = b""
    while len(found) < count:
        if not (part := connection.recv(count - len(found))):
            raise ConnectionError("the connection was closed")
        found += part
    return found


def _make_ready(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
