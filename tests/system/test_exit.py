"""The interpreter, or a forked child, exits while lanes are running: no hang, no abort, nothing on stderr."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1] / "support"


def ended(*arguments: str) -> tuple[int, str, str]:
    """Exit code, errors and output of the program."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
    # From 3.12 on Python warns of every fork beside threads, and there are threads: the lanes.
    done = subprocess.run([sys.executable, "-W", "ignore::DeprecationWarning", "-X", "faulthandler", str(HERE / "exiting.py"),
                           *arguments], capture_output=True, text=True, timeout=120, env=environment, check=False)
    return done.returncode, done.stderr, done.stdout


def test_a_program_and_its_forked_child_end_with_work_in_flight() -> None:
    assert ended() == (0, "", "ending True\n")


@pytest.mark.nightly(held_by=(
    "tests/system/test_exit.py::test_a_program_and_its_forked_child_end_with_work_in_flight",
    "tests/system/test_ranks_faults.py::test_a_rank_that_fails_ends_the_others_with_its_name"))
def test_a_program_ends_while_a_lane_computes_though_another_rank_has_failed() -> None:
    assert ended("failed") == (0, "", "rank 1 has ended\n")


#: A script that ends with an error, and what comes after that waits in C for so many seconds, as a destructor does.
LATE = """
import atexit, ctypes, sys
from megacompile.system.exit_limit import limit_exit
atexit.register(ctypes.CDLL(None).sleep, int(sys.argv[1]))
limit_exit(3.0)
limit_exit(3.0)
raise SystemExit(7)
"""


@pytest.mark.parametrize(("waits", "code"), [(60, -signal.SIGALRM), (0, 7)])
def test_an_exit_that_hangs_ends_at_its_limit_and_another_is_as_it_was(waits: int, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", LATE, str(waits)], timeout=50, check=False,
                          env={**os.environ, "PYTHONPATH": str(HERE.parents[1])})
    assert done.returncode == code
