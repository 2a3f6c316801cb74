"""Two GPUs train one copy of a model: losses, gradients and weights of native PyTorch in fp32, and the end of a rank."""
from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from jobs import EXACT, USUAL, train_native
from processes import start
from test_ranks_parity import assert_alike, found_by

from megacompile.frontend.tracing.model_options import loop_is_an_op

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
JOBS = (*USUAL, "arrival", "visits", "deferred moments", "waves", "uneven rows, packed", "slabs")
SCRIPT = Path(__file__).resolve().parents[1] / "support" / "jobs.py"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each rank had at the end of each job."""
    found = tmp_path_factory.mktemp("ranks")
    names = [f"{name}|" for name in JOBS] + ["qwen2|again"]
    start(SCRIPT, 2, found, names, fork=False, JOB_DEVICE="cuda").results(420)
    return found


@pytest.mark.parametrize("name", [name for name in JOBS if name not in EXACT])
def test_two_gpus_train_as_native_pytorch_with_all_rows(folder: Path, name: str) -> None:
    expected = train_native(name, 2)
    for rank in range(2):
        if "expert" in name and not loop_is_an_op():
            error = torch.load(folder / f"{name}|.{rank}.pt")["error"]
            assert "UnsupportedError" in error and "upgrade transformers to 5.23" in error
            continue
        drift = 2e-3 if name == "matrices" else 5e-4  # products of matrices in bfloat16
        assert_alike(found_by(folder, name, rank), expected, rank, first=2e-6, drift=drift, zero=1e-7)


def test_two_gpus_that_share_matrices_have_the_bits_of_one(folder: Path, tmp_path: Path) -> None:
    name = "matrices, the same rows"
    start(SCRIPT, 1, tmp_path, [f"{name}|"], fork=False, JOB_DEVICE="cuda").results(240)
    alone, found = found_by(tmp_path, name, 0), found_by(folder, name, 1)
    for part in ("weights", "moments"):
        assert all(torch.equal(alone[part][key], found[part][key]) for key in alone[part])


def test_two_runs_on_two_gpus_have_the_same_bits(folder: Path) -> None:
    for rank in range(2):
        one, other = found_by(folder, "qwen2", rank), found_by(folder, "qwen2", rank, "again")
        for part in ("weights", "moments", "gradients"):
            assert all(torch.equal(one[part][key], other[part][key]) for key in one[part] | other[part])


#: Trains until it is killed, and writes a file after a few steps. SIGUSR1 makes it print the place of each thread, also while
#: one of them waits in C.
ENDLESS = """
import faulthandler
import os
import signal
from pathlib import Path
import torch
import megacompile
from jobs import LR, even, qwen2

faulthandler.register(signal.SIGUSR1)
rank, folder = int(os.environ["RANK"]), Path(os.environ["RESULTS"])
model = megacompile.stream(qwen2(), device="cuda", compile=False)
optimizer = megacompile.AdamW(model.parameters(), lr=LR, max_grad_norm=1.0)
for step in range(10**6):
    loss = model.megacompile.train_step(even(rank, step), optimizer)
    match os.environ.get("READS"):
        case "loss":
            loss.item()
        case "device":
            torch.cuda.synchronize()
    if step == 5:
        (folder / f"{rank}.begun").touch()
"""


@pytest.mark.parametrize(("number", "reads", "gone"), [
    (signal.SIGSTOP, "", 1), (signal.SIGSTOP, "loss", 1), (signal.SIGSTOP, "device", 0), (signal.SIGKILL, "", 1),
    (signal.SIGKILL, "loss", 0)])
def test_a_killed_or_stopped_rank_ends_the_other_in_thirty_seconds(tmp_path: Path, number: signal.Signals, reads: str,
                                                                  gone: int) -> None:
    """`reads`: what the script waits for after each step. `gone`: the rank that is killed or stopped."""
    (tmp_path / "endless.py").write_text(ENDLESS)
    job = start(tmp_path / "endless.py", 2, tmp_path / "job", fork=False, READS=reads)
    limit = time.monotonic() + 120
    while not all((tmp_path / "job" / f"{rank}.begun").exists() for rank in range(2)):
        assert time.monotonic() < limit and all(p.poll() is None for p in job.processes), job.errors(0) + job.errors(1)
        time.sleep(0.1)
    other = 1 - gone
    job.processes[gone].send_signal(number)
    began = time.monotonic()
    try:
        job.processes[other].wait(40)
    except subprocess.TimeoutExpired:
        job.processes[other].send_signal(signal.SIGUSR1)
        time.sleep(1)
        state = Path(f"/proc/{job.processes[gone].pid}/stat").read_text()
        pytest.fail(f"rank {other} has not ended, and rank {gone} is {state[:40]}; rank {other} says: {job.errors(other)}")
    finally:
        for process in job.processes:
            process.kill()
            process.wait()
    print(job.errors(other))  # shown with -s: how the process ended
    assert time.monotonic() - began < 30
    assert f"rank {gone}" in job.errors(other) and "RankError" in job.errors(other)
