"""A process whose caller waits inside CUDA for a rank that has ended says so and ends; others go on."""
from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megacompile.runtime import device_watch
from megacompile.runtime.device_watch import LOOKS, DeviceWatch

GONE = "rank 1 (process 7) was stopped by a signal"


class Job:
    """What a watch asks for, under the test's control."""

    def __init__(self) -> None:
        self.trouble, self.busy = "", False
        self.watch = DeviceWatch(lambda: self.trouble, lambda: self.busy)

    def looks(self, count: int, trouble: str = GONE, busy: bool = True) -> list[str]:
        self.trouble, self.busy = trouble, busy
        return [self.watch.look() for _ in range(count)]


def test_an_exchange_may_wait_for_a_rank_that_has_ended_until_the_limit() -> None:
    assert Job().looks(LOOKS) == [*[""] * (LOOKS - 1), GONE]


@pytest.mark.parametrize(("trouble", "busy"), [(GONE, False), ("", True)])
def test_a_device_without_exchanges_or_a_job_without_trouble_begins_the_count_again(trouble: str, busy: bool) -> None:
    job = Job()
    assert not any(job.looks(LOOKS - 1) + job.looks(1, trouble, busy) + job.looks(LOOKS - 1))
    assert job.looks(1) == [GONE]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch acts at its first look."""
    monkeypatch.setattr(device_watch, "PERIOD_S", 0.01)
    monkeypatch.setattr(device_watch, "LOOKS", 1)


@pytest.mark.usefixtures("at_once")
def test_a_closed_watch_has_no_thread_and_ends_nothing() -> None:
    looked, go_on, ended = threading.Event(), threading.Event(), []

    def trouble() -> str:
        looked.set()
        assert go_on.wait(10)
        return GONE

    watch = DeviceWatch(trouble, lambda: True, ended.append)
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
    closed, ended = threading.Event(), []

    def collect() -> str:
        watch.close()
        closed.set()
        return GONE

    watch = DeviceWatch(collect, lambda: True, ended.append)
    watch.start()
    assert closed.wait(10)
    watch._thread.join(10)
    assert not watch._thread.is_alive() and not ended


#: A main thread that waits in C, as in CUDA, for a rank that has ended.
BLOCKED = f"""
import ctypes
from megacompile.runtime import device_watch
device_watch.PERIOD_S, device_watch.LOOKS = 0.05, 3
device_watch.DeviceWatch(lambda: {GONE!r}, lambda: True).start()
try:
    def read_the_loss():
        ctypes.CDLL(None).sleep(60)
    read_the_loss()
finally:
    print("unwound")
"""


def test_a_process_that_waits_in_c_ends_with_the_cause_and_its_place() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED], timeout=50, check=False, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])})
    assert done.returncode == 1 and done.stdout == ""
    assert "in read_the_loss" in done.stderr
    assert done.stderr.splitlines()[-1] == f"megacompile.errors.RankError: {GONE}"
