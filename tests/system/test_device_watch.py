"""A process whose caller waits inside CUDA for a rank that has ended says so and ends; others go on."""
from __future__ import annotations

import linecache
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megacompile.runtime import rank_watch
from megacompile.runtime.rank_watch import LOOKS, LOOKS_IF_TOLD, DeviceWatch

GONE = "rank 1 (process 7) was stopped by a signal"


class Job:
    """What a watch asks for, under the test's control. The caller is a thread that waits for `move` to be released, and then
    for `over`."""

    def __init__(self) -> None:
        self.trouble, self.busy, self.told = GONE, True, False
        self.move, self.over = threading.Lock(), threading.Lock()
        for lock in (self.move, self.over):
            lock.acquire()
        self.caller = threading.Thread(target=self._call, daemon=True)
        self.caller.start()
        self.watch = DeviceWatch(lambda: self.trouble, lambda: self.busy, lambda: self.caller.ident or 0, lambda: self.told)
        self.wait_until_it_stands_at("self.move.acquire()")
        self.watch.look()  # sees where the caller stands

    def wait_until_it_stands_at(self, line: str) -> None:
        """Until the caller's thread stands at this line, which is one call of C: it is nowhere else in the line when another
        thread looks."""
        limit = time.monotonic() + 60
        while True:
            frame = sys._current_frames().get(self.caller.ident or 0)
            if frame is not None and linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() == line:
                return
            assert time.monotonic() < limit
            time.sleep(0.001)

    def _call(self) -> None:
        self.move.acquire()
        self.over.acquire()

    def looks(self, count: int) -> list[str]:
        return [self.watch.look() for _ in range(count)]


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    for lock in (made.move, made.over):
        if lock.locked():
            lock.release()
    made.caller.join(10)


def test_a_caller_may_wait_for_a_rank_that_has_ended_until_the_limit(job: Job) -> None:
    assert job.looks(LOOKS) == [*[""] * (LOOKS - 1), GONE]


def test_a_job_without_trouble_begins_the_count_again(job: Job) -> None:
    job.looks(LOOKS - 1)
    job.trouble = ""
    job.looks(1)
    job.trouble = GONE
    assert job.looks(LOOKS) == [*[""] * (LOOKS - 1), GONE]


def test_a_caller_that_moves_begins_the_count_again(job: Job) -> None:
    job.looks(LOOKS - 1)
    job.move.release()
    job.wait_until_it_stands_at("self.over.acquire()")
    assert job.looks(LOOKS + 1) == [*[""] * LOOKS, GONE]


def test_a_device_without_exchanges_ends_nothing(job: Job) -> None:
    job.busy = False
    assert not any(job.looks(LOOKS_IF_TOLD))


def test_a_caller_that_was_told_by_an_error_has_minutes(job: Job) -> None:
    job.told = True
    assert job.looks(LOOKS_IF_TOLD) == [*[""] * (LOOKS_IF_TOLD - 1), GONE]


def watch_of_this_thread(trouble: Callable[[], str], ended: list[str]) -> DeviceWatch:
    here = threading.get_ident()
    return DeviceWatch(trouble, lambda: True, lambda: here, lambda: False, lambda cause, caller: ended.append(cause))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch acts at its first look."""
    monkeypatch.setattr(rank_watch, "DEVICE_PERIOD_S", 0.01)
    monkeypatch.setattr(rank_watch, "LOOKS", 0)


@pytest.mark.usefixtures("at_once")
def test_a_closed_watch_has_no_thread_and_ends_nothing() -> None:
    looked, go_on, ended = threading.Event(), threading.Event(), list[str]()

    def trouble() -> str:
        looked.set()
        assert go_on.wait(10)
        return GONE

    watch = watch_of_this_thread(trouble, ended)
    watch.start()
    assert looked.wait(10)
    closing = threading.Thread(target=watch.close)
    closing.start()
    while not watch._closed.is_set():
        time.sleep(0.001)
    go_on.set()
    closing.join(10)
    assert not closing.is_alive() and not watch._thread.is_alive() and not ended


@pytest.mark.usefixtures("at_once")
def test_a_watch_can_be_closed_in_its_own_thread() -> None:
    closed, ended = threading.Event(), list[str]()

    def collect() -> str:
        watch.close()
        closed.set()
        return GONE

    watch = watch_of_this_thread(collect, ended)
    watch.start()
    assert closed.wait(10)
    watch._thread.join(10)
    assert not watch._thread.is_alive() and not ended


#: A main thread that waits in C, as in CUDA, for a rank that has ended. `{busy}`: whether the device has exchanges; it may take
#: `{answer_s}` seconds to say so.
BLOCKED = """
import ctypes, sys, threading, time
from megacompile.runtime import rank_watch
rank_watch.DEVICE_PERIOD_S, rank_watch.LOOKS, rank_watch._ANSWER_S = 0.05, 3, {answer_s}
here, waits = threading.get_ident(), threading.Event()
rank_watch.DeviceWatch(lambda: "{cause}" if waits.is_set() else "", lambda: {busy}, lambda: here, lambda: False).start()
print("buffered", end="")
try:
    def read_the_loss():
        waits.set()
        ctypes.CDLL(None).sleep(60)
    read_the_loss()
finally:
    print("unwound")
"""


def run(busy: object, answer_s: float = 30, **how: Any) -> subprocess.CompletedProcess[str]:
    script = BLOCKED.format(cause=GONE, busy=busy, answer_s=answer_s)
    return subprocess.run([sys.executable, "-c", script], timeout=50, check=False, text=True, stdout=subprocess.PIPE,
                          env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}, **how)


def test_a_process_that_waits_in_c_ends_with_the_cause_and_its_place() -> None:
    done = run(busy=True, stderr=subprocess.PIPE)
    assert done.returncode == 1 and done.stdout == "buffered"
    assert "in read_the_loss" in done.stderr
    assert done.stderr.splitlines()[-1] == f"megacompile.errors.RankError: {GONE}"


def test_a_device_that_does_not_answer_ends_the_process_with_the_places_of_all_threads() -> None:
    done = run("ctypes.PyDLL(None).sleep(60)", answer_s=0.5, stderr=subprocess.PIPE)  # holds the lock
    assert done.returncode == 1 and "in read_the_loss" in done.stderr and "in _is_busy" in done.stderr


def test_a_process_ends_though_nobody_reads_its_errors() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert run(busy=True, stderr=writer).returncode == 1
    finally:
        os.close(writer)
