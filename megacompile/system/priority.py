"""Thread priorities, for machines with more busy threads than cores."""
from __future__ import annotations

import contextlib
import os
import threading

#: Added to the niceness of the threads that update weights. The training loop prepares the next batch while they run. At equal
#: priority, each of its PyTorch operations on more than 32,768 elements waits some milliseconds for a core.
UPDATE_NICENESS = 5


def yield_to_others() -> None:
    """Lowers the priority of the calling thread and of the threads that it starts from now on, including OpenMP's."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # a sandbox may forbid it; this only costs speed
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + UPDATE_NICENESS)
