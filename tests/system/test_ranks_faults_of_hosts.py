"""A rank on one host that ends, fails or stalls ends those on the other hosts, with its name, its host and the cause."""
from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest
from fault_jobs import RAISED, SCRIPT, began, ended, nightly
from processes import Job

#: How long all ranks may take to hear of it, in seconds.
LIMIT_S = 30


def all_hear(job: Job, faulty: int, since: float, says: str) -> None:
    """The other ranks end in time with an error that says it."""
    for rank, process in enumerate(job.processes):
        if rank != faulty:
            code = process.wait(60)
            found = ended(job, rank)
            assert code == RAISED, job.errors(rank)
            assert found["error"] == "RankError" and says in found["message"].splitlines()[0], (rank, found)
            assert "start the job again from the last checkpoint" in found["message"]
            assert found["at"] - since < LIMIT_S


@pytest.mark.parametrize(("ranks", "faulty", "number", "says"), [
    (4, 3, signal.SIGKILL, "has ended"), (2, 1, signal.SIGSTOP, "has stopped answering"),
    nightly(4, 2, signal.SIGKILL, "has ended"), nightly(4, 3, signal.SIGSTOP, "was stopped by a signal"),
    nightly(2, 0, signal.SIGKILL, "has ended"), nightly(4, 0, signal.SIGSTOP, "")])
def test_a_rank_of_a_host_that_is_killed_or_stopped_ends_those_of_the_others(
        start_job: Callable[..., Job], ranks: int, faulty: int, number: signal.Signals, says: str) -> None:
    job = start_job(SCRIPT, ranks, "loop", str(faulty), hosts=2)
    began(job, faulty)
    time.sleep(0.5)
    job.processes[faulty].send_signal(number)
    host = f"node{2 * faulty // ranks}"
    all_hear(job, faulty, time.time(), f"rank {faulty} (process {job.processes[faulty].pid}) on host {host} {says}")


@pytest.mark.parametrize(("ranks", "host", "number", "says"), [
    (4, 1, signal.SIGKILL, "has ended"), nightly(2, 1, signal.SIGSTOP, "has stopped answering"),
    nightly(4, 0, signal.SIGKILL, "has ended")])
def test_a_dead_host_of_a_divided_copy_is_named_on_all_others(
        start_job: Callable[..., Job], ranks: int, host: int, number: signal.Signals, says: str) -> None:
    dead = range(host * ranks // 2, (host + 1) * ranks // 2)
    job = start_job(SCRIPT, ranks, "loop", str(dead[0]), "divided", hosts=2)
    began(job, dead[0], 60)
    time.sleep(0.5)
    for rank in dead:
        job.processes[rank].send_signal(number)
    since = time.time()
    for rank in set(range(ranks)) - set(dead):
        assert job.processes[rank].wait(60) == RAISED, job.errors(rank)
        found = ended(job, rank)
        assert found["error"] == "RankError" and f" on host node{host} {says}" in found["message"].splitlines()[0], found
        assert found["at"] - since < LIMIT_S


@pytest.mark.parametrize(("fault", "says"), [
    nightly("all_reduce", "has failed with LaneError: all_reduce failed in lane collective: RuntimeError: power cut"),
    nightly("raises", "(process "), nightly("exits", "(process ")])
def test_a_rank_of_a_host_that_fails_ends_those_of_the_others(start_job: Callable[..., Job], fault: str, says: str) -> None:
    job = start_job(SCRIPT, 2, fault, "1", hosts=2)
    begun = began(job)
    host = " on host node1 " if "(" not in says else " "
    all_hear(job, 1, begun, f"rank 1{host}{says}")


@pytest.mark.nightly(held_by="tests/system/test_ranks_faults.py::test_ranks_that_differ_are_refused_before_the_first_step")
def test_ranks_of_several_hosts_that_make_other_calls_are_told(start_job: Callable[..., Job]) -> None:
    job = start_job(SCRIPT, 4, "loop, other call", "3", hosts=2)
    began(job, 3)
    job.wait(60)
    for rank in (0, 1, 2):
        assert "rank 3 calls train_step while rank" in ended(job, rank)["message"]
