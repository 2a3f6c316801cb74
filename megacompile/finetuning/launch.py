"""Starts a command in one process for each GPU of this host, as torchrun would, and waits for them.

torchrun itself passes on a Ctrl-C that the terminal has already sent to every process, and kills processes that take longer
than half a minute to save. Here each process gets a signal once (its session is its own, which no terminal signals), and may
finish its step and save.
"""
from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import IO

import torch

from megacompile.errors import ArgumentError
from megacompile.planning.config import check_device

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Seconds that the other processes may take to end by themselves once one has failed, and seconds between two checks.
_ENDING_S, _LOOK_S = 40.0, 0.1
#: Characters of another process's output that are shown if it is the one that failed.
_SHOWN = 4000


def check_gpus(gpus: int, device: str | None) -> None:
    """Raises `ArgumentError` if this machine has fewer GPUs. A job on the CPU may have any number of processes."""
    check_device(device)
    there = torch.cuda.device_count()
    if device is None and there == 0:
        return
    if (device is None or torch.device(device).type == "cuda") and gpus > there:
        raise ArgumentError(f"--gpus {gpus} needs {gpus} GPUs, and this machine has {there}: give --gpus {max(1, there)}")


def launch(arguments: Sequence[str], processes: int) -> int:
    """Runs `megacompile ARGUMENTS` in several processes. Returns 0, or the exit code of the process that failed first.

    The first process has the terminal. What the others print is shown only if one of them failed first."""
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(1, processes)]
        running: list[subprocess.Popen[bytes]] = []
        previous = {each: signal.signal(each, _passed_on(running, each)) for each in _SIGNALS}
        try:
            running.extend(_started(arguments, processes, files))
            first = _wait(running)
        finally:
            for process in running:
                process.kill()
                process.wait()
            for each, handler in previous.items():
                signal.signal(each, handler)
        if first is None:
            return 0
        if first > 0:
            file = files[first - 1]
            file.seek(0)
            sys.stderr.write(f"process {first} of {processes}:\n{file.read().decode(errors='replace')[-_SHOWN:]}")
        code = running[first].returncode
        return code if code > 0 else 128 - code


def _started(arguments: Sequence[str], processes: int, files: Sequence[IO[bytes]]) -> Iterator[subprocess.Popen[bytes]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    outputs: list[IO[bytes] | None] = [None, *files]
    for rank, output in enumerate(outputs):
        yield subprocess.Popen([sys.executable, "-m", "megacompile", *arguments], stdout=output, stderr=output, env={
            **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes), "RANK": str(rank), "LOCAL_RANK": str(rank)}, start_new_session=True)


def _passed_on(running: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> Callable[[int, FrameType | None], None]:
    def handle(_: int, frame: FrameType | None) -> None:
        for process in running:
            process.send_signal(number)  # does nothing to a process that has ended
    return handle


def _wait(running: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Waits for all processes. Returns the first that failed, or None. The others then have some time to end."""
    first, limit = None, float("inf")
    while any(process.poll() is None for process in running) and time.monotonic() < limit:
        if first is None and (failed := [rank for rank, process in enumerate(running) if process.poll()]):
            first, limit = failed[0], time.monotonic() + _ENDING_S
        time.sleep(_LOOK_S)
    return next((rank for rank, process in enumerate(running) if process.poll()), None) if first is None else first
