"""Which threads go first where there are more of them than cores."""
from __future__ import annotations

import contextlib
import os
import threading

#: Added to the niceness of the threads that update weights. The training loop prepares the next batch while they run: at equal
#: priority each PyTorch operation on more than 32,768 elements there waits some milliseconds for their cores.
UPDATE_NICENESS = 5


def yield_to_others() -> None:
    """Lowers the priority of the calling thread, and of the threads that it starts from now on, OpenMP's included."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # a sandbox may forbid it, and then only speed is lost
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + UPDATE_NICENESS)
