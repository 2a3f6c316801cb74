"""Limits how long this process takes to exit once another rank has ended.

Its GPU may wait for that rank forever, and the destructors of CUDA and NCCL wait for the GPU. Python's threads do not run then,
so the kernel ends the process.
"""
from __future__ import annotations

import atexit
import functools
import signal

#: Seconds from the end of the script. With the time until a rank is seen to have ended, this is less than half a minute.
LIMIT_S = 15.0


@functools.cache
def limit_exit(seconds: float = LIMIT_S) -> None:
    """From now on, this process ends so many seconds after its script has: by itself, or by SIGALRM."""
    atexit.register(_limit, seconds)


def _limit(seconds: float) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
