"""A process whose caller waits inside CUDA for a rank that has ended says so and ends; others go on."""
from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megacompile.runtime import device_watch
from megacompile.runtime.device_watch import LIMIT_S, DeviceWatch

GONE = "rank 1 (process 7) was stopped by a signal"


class Job:
    """What a watch asks for, under the test's control."""

    def __init__(self) -> None:
        self.trouble, self.busy = "", False
        self.watch = DeviceWatch(lambda: self.trouble, lambda: self.busy)

    def at(self, seconds: float, trouble: str = GONE, busy: bool = True) -> str:
        self.trouble, self.busy = trouble, busy
        return self.watch.look(seconds)


def test_an_exchange_may_wait_for_a_rank_that_has_ended_until_the_limit() -> None:
    job = Job()
    assert not job.at(100.0) and not job.at(100.0 + LIMIT_S - 0.1)
    assert job.at(100.0 + LIMIT_S) == GONE


@pytest.mark.parametrize("calm", [{"busy": False}, {"trouble": ""}])
def test_a_device_without_exchanges_or_a_job_without_trouble_starts_the_time_again(calm: dict[str, object]) -> None:
    job = Job()
    assert not job.at(0.0) and not job.at(LIMIT_S - 1, **calm) and not job.at(LIMIT_S)  # type: ignore[arg-type]
    assert not job.at(2 * LIMIT_S - 0.1)
    assert job.at(2 * LIMIT_S) == GONE


def test_a_closed_watch_has_no_thread_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_watch, "PERIOD_S", 0.01)
    monkeypatch.setattr(device_watch, "LIMIT_S", 0.0)
    ended: list[str] = []
    closed = DeviceWatch(lambda: GONE, lambda: not closed._thread.is_alive(), ended.append)
    closed.start()
    closed.close()
    assert not ended and not closed._thread.is_alive()

    said = threading.Event()
    open_one = DeviceWatch(lambda: GONE, lambda: True, lambda cause: said.set())
    open_one.start()
    assert said.wait(10), "the same watch acts while it is open"
    open_one.close()


#: A main thread that waits in C, as in CUDA, for a rank that has ended.
BLOCKED = f"""
import ctypes
from megacompile.runtime import device_watch
device_watch.PERIOD_S, device_watch.LIMIT_S = 0.05, 0.2
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
