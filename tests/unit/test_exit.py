"""The interpreter, or a forked child, exits while lanes are running: no hang, no abort, nothing on stderr."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def ended(*arguments: str) -> tuple[int, str, str]:
    """Exit code, errors and output of the program."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
    # From 3.12 on Python warns of every fork beside threads, and there are threads: the lanes.
    done = subprocess.run([sys.executable, "-W", "ignore::DeprecationWarning", "-X", "faulthandler", str(HERE / "exiting.py"),
                           *arguments], capture_output=True, text=True, timeout=120, env=environment, check=False)
    return done.returncode, done.stderr, done.stdout


def test_a_program_and_its_forked_child_end_with_work_in_flight() -> None:
    assert ended() == (0, "", "ending True\n")


def test_a_program_ends_while_a_lane_computes_though_another_rank_has_failed() -> None:
    assert ended("failed") == (0, "", "rank 1 has ended\n")
