"""Fixtures of several tiers: streamed models that tests share (a capture takes seconds, putting back a model's weights takes
none), and jobs of several processes."""
from __future__ import annotations

import os
import pathlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import disk_models
import pytest
import tiny_models
import torch
from processes import Job, start
from resumable import Run, Streamed

from megacompile.finetuning import run_progress
from megacompile.system import direct_file

__all__ = ["_shared_bf16", "_shared_fp32", "all_on_disk", "bf16_model", "ctrl_c_after_two_steps", "drive", "launch",
           "model", "native", "resumable", "run", "small_chunks", "some_on_disk", "start_job", "without_disk"]


@pytest.fixture(scope="session")
def _shared_fp32() -> Iterator[tiny_models.Shared]:
    shared = tiny_models.Shared(checkpoint_interval=2, micro_batch_size=2)
    yield shared
    shared.close()


@pytest.fixture(scope="session")
def _shared_bf16() -> Iterator[tiny_models.Shared]:
    shared = tiny_models.Shared(bf16=True, resident="all", micro_batch_size=2)
    yield shared
    shared.close()


@pytest.fixture
def model(_shared_fp32: tiny_models.Shared) -> Any:
    """A streamed fp32 model of three layers, as it was made: K = 2, micro-batches of 2."""
    return _shared_fp32.fresh()


@pytest.fixture
def native(_shared_fp32: tiny_models.Shared) -> Any:
    """The same model, not streamed."""
    return _shared_fp32.native()


@pytest.fixture
def bf16_model(_shared_bf16: tiny_models.Shared) -> Any:
    """A streamed bf16 model of three layers, as it was made: K = 1, all weights resident."""
    return _shared_bf16.fresh()


@pytest.fixture(scope="module")
def resumable() -> Streamed:
    """A streamed model that is captured quickly, with what else a checkpoint must hold."""
    return Streamed()


@pytest.fixture
def run(resumable: Streamed) -> Run:
    """A training run of it, after two steps."""
    run = Run(resumable.fresh())
    run.steps(2)
    return run


@pytest.fixture
def ctrl_c_after_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """`megacompile train` gets SIGINT when its second step has been shown."""
    show = run_progress.ProgressDisplay.__call__

    def show_then_interrupt(display: run_progress.ProgressDisplay, entry: run_progress.Entry) -> None:
        show(display, entry)
        if entry.step.number == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(run_progress.ProgressDisplay, "__call__", show_then_interrupt)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The moments of a tile are read and written by several calls at a time."""
    monkeypatch.setattr(direct_file, "CHUNK", direct_file.BLOCK)


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder for moments on disk."""
    return tmp_path_factory.mktemp("nvme") / "state"


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def without_disk(request: pytest.FixtureRequest) -> Iterator[tiny_models.Shared]:
    made = tiny_models.Shared(bf16=request.param == "bf16", micro_batch_size=2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def all_on_disk(without_disk: tiny_models.Shared, drive: pathlib.Path) -> Iterator[tiny_models.Shared]:
    made = disk_models.streamed(without_disk.plain.dtype == torch.bfloat16, drive)
    yield made
    made.close()


@pytest.fixture(scope="module")
def some_on_disk(without_disk: tiny_models.Shared, drive: pathlib.Path) -> Iterator[tiny_models.Shared]:
    made = disk_models.streamed(without_disk.plain.dtype == torch.bfloat16, drive, disk_state=disk_models.SOME, state_slabs=1,
                                resident=("model.layers.2",))
    yield made
    made.close()


@pytest.fixture
def start_job(tmp_path: pathlib.Path) -> Iterator[Callable[..., Job]]:
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
