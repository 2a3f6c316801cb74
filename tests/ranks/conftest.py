"""Jobs of several processes on the CPU, with gloo."""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Modules beside the tests, and beside the unit tests, can be imported.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from processes import Job, start


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts a script's source in several processes. Whatever is left of them is killed at the end."""
    jobs: list[Job] = []

    def run(source: str, ranks: int, *arguments: str, hosts: int = 1, **environment: str) -> Job:
        folder = tmp_path / str(len(jobs))
        folder.mkdir()
        (folder / "script.py").write_text(source)
        jobs.append(start(folder / "script.py", ranks, folder, arguments, hosts, **environment))
        return jobs[-1]

    yield run
    for job in jobs:
        for process in job.processes:
            process.kill()
            process.wait()


@pytest.fixture
def launch(start_job: Callable[..., Job]) -> Callable[..., list[Any]]:
    """Runs a script's source in several processes. Returns what each rank wrote to `$RESULTS/$RANK.json`."""
    return lambda source, ranks, *arguments, **options: start_job(source, ranks, *arguments, **options).results()
