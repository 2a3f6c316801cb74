"""Tells the ranks of each host how those of the other hosts are: a small thread in the first rank of each host.

    host node0: rank 0  <--->  host node1: rank 2          each second, and at once when a rank is in trouble
                        <--->  host node2: rank 4

The first rank of the first host hears of all hosts and tells them of each other. What a host has told is copied to the board of
this one (`StatusBoard`), where every wait looks. A process that ends closes its connection. One that is stopped, or whose
machine or network is down, is silent: after `SILENCE_S` it counts as gone.
"""
from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from megacompile.runtime.hosts import Hosts
from megacompile.system.status_board import ENDED, SILENT, StatusBoard

#: How often hosts tell each other that they are there, and for how long one may be silent, in seconds. Together with the time
#: that a process takes to end, this is less than half a minute.
PERIOD_S, SILENCE_S = 1.0, 20.0
#: How long a rank waits until what it has to say was sent, in seconds.
_FLUSH_S = 2.0
#: A message begins with one of these, in eight bytes.
_OPEN, _CLOSED = (state.to_bytes(8, "little") for state in (0, 1))


@dataclass
class _Peer:
    """A rank that this process talks to. `outgoing`, `incoming`: parts of messages. `heard`: when it has said something.
    `closed`: it has closed its model, and says nothing any more. `lost`: nothing can be heard from it."""

    rank: int
    connection: socket.socket
    outgoing: bytes = b""
    incoming: bytearray = field(default_factory=bytearray)
    heard: float = field(default_factory=time.monotonic)
    closed: bool = False
    lost: bool = False


class HostWatch:
    """`connections`: to each rank that this process talks to. State: the peers, how many rounds of messages were begun, and
    whether it is asked to close, and closed."""

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
        """Tells the other hosts what the board says now. Returns when that was sent, or after a while."""
        with self._changed:
            wanted, limit = self._rounds + 2, time.monotonic() + _FLUSH_S  # a round that has begun may have looked before
            while self._thread.is_alive() and time.monotonic() < limit and (
                    self._rounds < wanted or any(peer.outgoing for peer in self.peers if not peer.lost)):
                self._ask.send(b"!")
                self._changed.wait(0.02)

    def close(self) -> None:
        """Tells the other hosts that this model is closed. The board is not read any more. The thread and the connections stay
        until the others have closed it too: if this process ends before, they must see it."""
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
        """Begins a round: sends the board to every peer that has taken the message before. Nothing once this is closed."""
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
        """Sends as much as the connection takes."""
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
        """Reads what a peer has told. Whether there is new trouble."""
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
        """The ranks that a peer tells of: those of its host, or of all other hosts if it is the first rank of all."""
        rows = self.hosts.rows
        told_of = rows if peer == rows[0][0] else [rows[self.hosts.host_of(peer)]]
        return [rank for row in told_of if self.hosts.rank not in row for rank in row]

    def _lose(self, peer: _Peer, gone: int) -> None:
        """Nothing can be heard from a peer any more. It may have ended because another rank had, of which it has told."""
        peer.lost = True
        self._selector.unregister(peer.connection)
        if not self.board.any_gone():
            self.board.mark(peer.rank, gone)
