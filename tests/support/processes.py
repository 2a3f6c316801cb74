"""Starts the processes of a job as torchrun does, and collects what each rank has to say."""
from __future__ import annotations

import atexit
import functools
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
#: What scripts may import from: the project, and modules beside the tests.
PATHS = (ROOT, ROOT / "tests", *(ROOT / "tests" / each for each in ("support", "model", "system")))
#: Ranks are forked from one process, which has imported `before_ranks`.
_CONTEXT = multiprocessing.get_context("forkserver")


@functools.cache
def _start_server() -> None:
    _CONTEXT.set_forkserver_preload(["before_ranks"])
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, PATHS)), OMP_NUM_THREADS="1"):
        forkserver.ensure_running()


class Process:
    """A process that runs a Python script, used as `subprocess.Popen` is."""

    def __init__(self, script: Path, arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
        _start_server()
        self._process = _CONTEXT.Process(target=_run, args=(script, arguments, dict(environment), output))
        self._process.start()
        self.pid: int = self._process.pid or 0

    def poll(self) -> int | None:
        """The exit code: negative, the number of a signal; None, if the process still runs."""
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        """The exit code. Raises `subprocess.TimeoutExpired` if the process still runs after so many seconds."""
        self._process.join(seconds)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", seconds or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fresh_process() -> ProcessPoolExecutor:
    """A process that has run nothing, and need not import what ranks import: for what forks, which threads and other models'
    memory do not survive."""
    _start_server()
    return ProcessPoolExecutor(1, _CONTEXT)


def _run(script: Path, arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
    """Runs a script as `python SCRIPT ...` does, with standard output and error in a file."""
    assert "before_ranks" in sys.modules, "the server could not import it"
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [str(script), *arguments]
    sys.path[:0] = map(str, (script.parent, *PATHS))
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a forked process leaves them out


@dataclass
class Job:
    """The processes of all ranks, in order. `folder`: where each rank writes `<rank>.json`, and its errors to `<rank>.txt`."""

    processes: list[Process | subprocess.Popen[bytes]]
    folder: Path

    def wait(self, seconds: float = 240.0) -> list[int]:
        """The exit code of each rank. Kills what is left after so many seconds."""
        limit = time.monotonic() + seconds
        try:
            return [process.wait(max(0.0, limit - time.monotonic())) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
                process.wait()

    def errors(self, rank: int) -> str:
        return (self.folder / f"{rank}.txt").read_text(errors="replace")

    def results(self, seconds: float = 240.0) -> list[Any]:
        """What each rank has written. Fails if any rank has."""
        codes = self.wait(seconds)
        assert not any(codes), "\n".join(f"rank {rank} ended with {code}:\n{self.errors(rank)[-3000:]}"
                                         for rank, code in enumerate(codes) if code)
        return [json.loads((self.folder / f"{rank}.json").read_text()) for rank in range(len(codes))]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def _unforked(script: Path, arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> subprocess.Popen[bytes]:
    with output.open("wb") as file:
        return subprocess.Popen([sys.executable, str(script), *arguments], env=dict(environment), stdout=file,
                                stderr=subprocess.STDOUT)


def start(script: Path, ranks: int, folder: Path, arguments: Sequence[str] = (), hosts: int = 1, fork: bool = True,
          **environment: str) -> Job:
    """Runs a script in one process for each rank. `hosts`: on how many hosts the ranks say that they are. `fork`: off for
    ranks that use GPUs, since CUDA does not start in a process that was forked from one that has asked for GPUs."""
    folder.mkdir(parents=True, exist_ok=True)
    processes: list[Process | subprocess.Popen[bytes]] = []
    port = free_port()
    host_of = [rank * hosts // ranks for rank in range(ranks)]
    for rank in range(ranks):
        host = {"MEGACOMPILE_HOST": f"node{host_of[rank]}"} if hosts > 1 else {}
        of_rank: Mapping[str, str] = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, PATHS)), "RANK": str(rank),
            "LOCAL_RANK": str(rank - host_of.index(host_of[rank])), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "RESULTS": str(folder), **host, **environment}
        processes.append((Process if fork else _unforked)(script, arguments, of_rank, folder / f"{rank}.txt"))
    return Job(processes, folder)
