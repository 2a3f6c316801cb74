"""Starts the processes of a job as torchrun does, and collects what each rank has to say."""
from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: What scripts may import from: the project, and modules beside the tests.
PATHS = (ROOT, ROOT / "tests" / "unit", ROOT / "tests" / "ranks")


@dataclass
class Job:
    """The processes of all ranks, in order. `folder`: where each rank writes `<rank>.json`, and its errors to `<rank>.txt`."""

    processes: list[subprocess.Popen[bytes]]
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


def start(script: Path, ranks: int, folder: Path, arguments: Sequence[str] = (), hosts: int = 1, **environment: str) -> Job:
    """Runs a script in one process for each rank, on the CPU. `hosts`: on how many hosts the ranks say that they are."""
    folder.mkdir(parents=True, exist_ok=True)
    processes, port = [], free_port()
    host_of = [rank * hosts // ranks for rank in range(ranks)]
    for rank in range(ranks):
        host = {"MEGACOMPILE_HOST": f"node{host_of[rank]}"} if hosts > 1 else {}
        of_rank: Mapping[str, str] = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, PATHS)), "RANK": str(rank),
            "LOCAL_RANK": str(rank - host_of.index(host_of[rank])), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "RESULTS": str(folder), **host, **environment}
        with (folder / f"{rank}.txt").open("wb") as errors:
            processes.append(subprocess.Popen([sys.executable, str(script), *arguments], env=of_rank, stdout=errors,
                                              stderr=subprocess.STDOUT))
    return Job(processes, folder)
