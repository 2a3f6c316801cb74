"""Streamed models that tests share: a capture takes seconds, putting back a model's weights takes none."""
from __future__ import annotations

import os
import pathlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "parity")]  # tests are not a package; the parity models serve too

import disk_models  # noqa: E402  (after the path is complete)
import tiny_models  # noqa: E402
from resumable import Run, Streamed  # noqa: E402

from megacompile.finetuning import run_progress  # noqa: E402
from megacompile.system import direct_file  # noqa: E402


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
