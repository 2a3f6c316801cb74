"""What hosts tell each other of their ranks, and how their processes connect. A host is played by a board in memory."""
from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from megacompile.errors import RankError
from megacompile.runtime import letters, rank_watch
from megacompile.runtime.hosts import Hosts
from megacompile.runtime.letters import Listener, connected
from megacompile.runtime.rank_watch import ENDED, ROW_BYTES, HostWatch, StatusBoard

ROWS = ((0, 1), (2, 3), (4, 5))


class Job:
    """Three hosts of two ranks. `boards[rank]`: what a rank sees. The processes of all ranks live until they are killed."""

    def __init__(self) -> None:
        self.processes = [subprocess.Popen(["sleep", "100"]) for _ in range(6)]
        pids = [process.pid for process in self.processes]
        self.boards: dict[int, StatusBoard] = {}
        for row in ROWS:
            memory = torch.zeros(6 * ROW_BYTES, dtype=torch.uint8)
            for rank in row:
                hosts = Hosts(ROWS, ("x", "y", "z"), rank)
                self.boards[rank] = StatusBoard(memory, rank, pids, row, hosts.where)
        ends = {leader: socket.socketpair() for leader in (2, 4)}
        for pair in ends.values():
            for each in pair:
                each.setblocking(False)
        self.watches = {0: HostWatch(self.boards[0], Hosts(ROWS, ("x", "y", "z"), 0), {n: pair[0] for n, pair in ends.items()})}
        for leader, pair in ends.items():
            self.watches[leader] = HostWatch(self.boards[leader], Hosts(ROWS, ("x", "y", "z"), leader), {0: pair[1]})

    def end(self) -> None:
        for watch in self.watches.values():
            watch.close()
        for process in self.processes:
            process.kill()
            process.wait()

    def told(self, rank: int, seconds: float = 5.0) -> str:
        """The trouble that a rank hears of."""
        limit = time.monotonic() + seconds
        while not (trouble := self.boards[rank].trouble()) and time.monotonic() < limit:
            time.sleep(0.01)
        return trouble


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(rank_watch, "PERIOD_S", 0.05)
    made = Job()
    yield made
    made.end()


class Clock:
    """The time of all watches, in whole seconds. It passes when a test says so, and threads may wait for a core meanwhile."""

    def __init__(self, job: Job) -> None:
        self.job, self.now = job, float(int(time.monotonic()) + 2)

    def monotonic(self) -> float:
        return self.now

    def passes(self, seconds: float, *hosts: int) -> None:
        """These hosts, by their first ranks, hear of each other in each second, and then look once more."""
        end, watches = self.now + seconds, [self.job.watches[leader] for leader in hosts]
        while self.now < end:
            self.now += 1.0
            while any(peer.heard < self.now for watch in watches for peer in watch.peers if peer.rank in hosts):
                for watch in watches:
                    watch.flush()
        for watch in watches:
            watch.flush()


@pytest.fixture
def clock(job: Job, monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock(job)
    monkeypatch.setattr(rank_watch, "time", made)
    made.passes(1.0, 0, 2, 4)
    return made


def test_nothing_is_told_of_ranks_that_are_well(job: Job) -> None:
    time.sleep(0.3)
    assert [board.trouble() for board in job.boards.values()] == [""] * 6
    assert job.boards[1].any_gone() is False


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_every_host_hears_of_a_process_that_was_killed_on_another(job: Job, rank: int) -> None:
    job.processes[rank].kill()
    job.processes[rank].wait()
    where = f" on host {'xyz'[rank // 2]}"
    for other in range(6):
        if other != rank:
            assert job.told(other) == f"rank {rank} (process {job.processes[rank].pid}){where} has ended"


def test_every_host_hears_of_a_process_that_was_stopped(job: Job) -> None:
    job.processes[5].send_signal(19)
    assert job.told(3) == f"rank 5 (process {job.processes[5].pid}) on host z was stopped by a signal"


def test_an_error_of_a_rank_is_told_with_its_text_to_ranks_that_have_failed_less_often(job: Job) -> None:
    job.boards[2].fail(ValueError("no more rows"))
    assert job.told(3) == "rank 2 on host y has failed with ValueError: no more rows"
    job.boards[5].fail(ValueError("no more rows"))  # the same happens there
    job.watches[2].flush()
    time.sleep(0.3)
    assert job.told(4) == "rank 2 on host y has failed with ValueError: no more rows"
    assert job.boards[5].trouble() == ""


def test_what_a_rank_says_before_it_ends_is_heard_and_names_the_cause(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the process that has told of it, which ends too."""
    monkeypatch.setattr(rank_watch, "_FLUSH_S", 60.0)  # on a busy machine two seconds may not suffice
    job.watches[2].board.fail(ValueError("power cut"))
    job.watches[2].flush()
    job.watches[2].peers[0].connection.shutdown(socket.SHUT_RDWR)
    for rank in (0, 1, 4, 5):
        assert job.told(rank) == "rank 2 on host y has failed with ValueError: power cut"


def test_a_connection_that_ends_names_the_process_behind_it(job: Job) -> None:
    job.watches[4].peers[0].connection.shutdown(socket.SHUT_RDWR)
    for rank in (0, 1, 2, 3):
        assert job.told(rank) == f"rank 4 (process {job.processes[4].pid}) on host z has ended"


def test_the_first_rank_that_ends_is_named_though_the_one_that_tells_of_it_ends_too(
        job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_watch, "_FLUSH_S", 60.0)  # as above
    job.processes[3].kill()
    job.processes[3].wait()
    job.watches[2].flush()
    job.watches[2].peers[0].connection.shutdown(socket.SHUT_RDWR)
    time.sleep(0.2)
    for rank in (0, 1, 4, 5):
        assert job.told(rank).startswith("rank 3 ")


def test_a_host_that_says_nothing_is_gone_after_a_while(job: Job, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    told, stopped, awake = StatusBoard.told, threading.Event(), threading.Event()

    def stops(board: StatusBoard) -> bytes:
        if board is job.boards[4]:
            stopped.set()
            awake.wait(60)
        return told(board)

    monkeypatch.setattr(StatusBoard, "told", stops)
    clock.now += 1.0
    assert stopped.wait(30)
    clock.passes(1.0, 0, 2)  # what it has said before is heard
    (last,) = (peer.heard for peer in job.watches[0].peers if peer.rank == 4)
    clock.passes(last + rank_watch.SILENCE_S - clock.now, 0, 2)
    assert [board.trouble() for board in job.boards.values()] == [""] * 6
    clock.passes(2.0, 0, 2)
    assert job.told(2).startswith(f"rank 4 (process {job.processes[4].pid}) on host z has stopped answering")
    assert job.told(1).startswith("rank 4 ")
    awake.set()


def test_a_host_that_has_closed_is_not_missed_until_its_process_ends(job: Job, clock: Clock) -> None:
    job.watches[4].close()
    clock.passes(1.5 * rank_watch.SILENCE_S, 0, 2)
    assert job.boards[0].trouble() == job.boards[3].trouble() == ""
    job.watches[4].peers[0].connection.shutdown(socket.SHUT_RDWR)
    assert job.told(3) == f"rank 4 (process {job.processes[4].pid}) on host z has ended"


def test_a_connection_that_ends_while_messages_wait_for_it_is_lost_once(job: Job) -> None:
    """It can then be read and written at once. The thread goes on."""
    near, far = socket.socketpair()
    near.setblocking(False)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # as little as the system allows
    pids = [process.pid for process in job.processes]
    board = StatusBoard(torch.zeros(6 * ROW_BYTES, dtype=torch.uint8), 0, pids, ROWS[0])
    watch = HostWatch(board, Hosts(ROWS, ("x", "y", "z"), 0), {4: near})
    limit = time.monotonic() + 10
    while not watch.peers[0].outgoing and time.monotonic() < limit:
        watch.flush()
    far.close()
    while not board.trouble() and time.monotonic() < limit:
        time.sleep(0.01)
    assert board.trouble() == f"rank 4 (process {pids[4]}) has ended"
    assert watch._thread.is_alive()
    watch.close()
    watch._thread.join(5)
    assert not watch._thread.is_alive() and near.fileno() == -1


def test_threads_end_once_all_hosts_have_closed(job: Job) -> None:
    for watch in job.watches.values():
        watch.close()
    for watch in job.watches.values():
        watch._thread.join(5)
        assert not watch._thread.is_alive()
        assert all(peer.connection.fileno() == -1 for peer in watch.peers)


def test_updates_of_other_hosts_are_not_waited_for(job: Job) -> None:
    job.boards[0].finished(1)
    assert not job.boards[0].all_finished(1)
    job.boards[1].finished(1)
    assert job.boards[0].all_finished(1)


# Connections

def test_processes_connect_by_number_and_others_are_turned_away() -> None:
    listener = Listener()
    found: dict[int, socket.socket] = {}
    thread = threading.Thread(target=lambda: found.update(listener.accepted(2)))
    thread.start()
    port, token = listener.door
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(bytes(len(token) // 2 + 8))
        assert stranger.recv(100) == b"", "a stranger is welcome"
    ends = {number: connected(["127.0.0.1"], listener.door, number) for number in (7, 4)}
    thread.join(10)
    assert found.keys() == {4, 7}
    for number, end in ends.items():
        found[number].sendall(bytes([number]))
        end.setblocking(True)
        assert end.recv(1) == bytes([number])
    for each in (*found.values(), *ends.values()):
        each.close()


def test_an_address_that_leads_elsewhere_is_passed_over() -> None:
    listener = Listener()
    thread = threading.Thread(target=listener.accepted, args=(1,))
    thread.start()
    connected(["host.invalid", "127.0.0.1"], listener.door, 1).close()
    thread.join(10)
    assert not thread.is_alive()


def test_a_host_that_cannot_be_reached_or_does_not_come_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letters, "_CONNECT_S", 0.1)
    listener = Listener()
    with pytest.raises(RankError, match=r"2 of 2 other hosts have not connected to rank 0: let their processes reach"):
        listener.accepted(2)
    with pytest.raises(RankError, match=r"port \d+ of rank 0 cannot be reached from this host \(127.0.0.1: .*: let the proc"):
        connected(["127.0.0.1"], listener.door, 1)




def test_a_process_that_may_not_listen_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> socket.socket:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket, "create_server", forbidden)
    with pytest.raises(RankError, match=r"\(Operation not permitted\): allow it to listen on a port"):
        Listener()


def test_what_a_rank_has_said_comes_before_its_end_whenever_a_process_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages come while it looks at the processes of its own host."""
    here, there = (StatusBoard(torch.zeros(3 * ROW_BYTES, dtype=torch.uint8), rank, [os.getpid()] * 3, row)
                   for rank, row in ((0, (0, 1)), (2, (2,))))
    there.fail(ValueError("power cut"))
    gone = StatusBoard._gone

    def meanwhile(board: StatusBoard, rank: int) -> int:
        if board is here and rank == 1:
            board.take(there.told(), [2])
            board.mark(2, ENDED)
        return gone(board, rank)

    monkeypatch.setattr(StatusBoard, "_gone", meanwhile)
    assert here.trouble() == "rank 2 has failed with ValueError: power cut"


def test_a_rank_that_ends_before_training_begins_is_named() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    processes = [os.getpid(), os.getpid(), ended.pid]
    with pytest.raises(RankError, match=rf"rank 2 \(process {ended.pid}\) has ended before training began: its output"):
        StatusBoard(torch.zeros(3 * ROW_BYTES, dtype=torch.uint8), 0, processes)
