"""Sequences divided among ranks: losses, gradients and weights are those of native PyTorch with whole sequences."""
from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Job, start
from sequence_jobs import JOBS, train_native
from test_ranks_parity import distance

SCRIPT = Path(__file__).parents[1] / "support" / "sequence_jobs.py"
#: (ranks, copies, jobs). With two copies, each trains other rows. All but the first two run on demand.
RUNS = [(2, 1, ("qwen2", "uneven groups", "attention kept")),
        (4, 1, ("windows and documents",)),
        (2, 1, tuple(JOBS)),
        (4, 1, ("llama", "documents", "uneven groups", "one group", "experts")),
        (4, 2, ("qwen2", "padding", "documents", "chunks", "arrival"))]


@pytest.fixture(scope="module", ids=str, params=[
    pytest.param(run, marks=[pytest.mark.nightly] * (number > 1)) for number, run in enumerate(RUNS)])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(copies, results of each job on each rank)."""
    ranks, copies, jobs = request.param
    folder = tmp_path_factory.mktemp("sequences")
    start(SCRIPT, ranks, folder, [str(copies), *jobs]).results(600)
    return copies, {name: [torch.load(folder / f"{name}.{rank}.pt") for rank in range(ranks)] for name in jobs}


def assert_trained(name: str, found: dict[str, Any], expected: dict[str, Any], drift: float = 2e-5) -> None:
    """That a rank has the results of native PyTorch. `drift`: of weights, relative."""
    assert "error" not in found, f"{name}: {found['error']}"
    assert found["losses"] == pytest.approx(expected["losses"], abs=max(1e-5, drift)), name
    assert found["evaluated"] == pytest.approx(expected["evaluated"], abs=1e-4 + drift), name
    assert found["weights"].keys() == expected["weights"].keys(), name
    assert distance(found["weights"], expected["weights"]) < drift * distance(expected["weights"]), name
    if name != "arrival":
        assert found["gradients"].keys() == expected["gradients"].keys(), name
        assert distance(found["gradients"], expected["gradients"]) < 1e-5 * distance(expected["gradients"]), name
        assert found["norm"] == pytest.approx(expected["norm"], rel=max(1e-4, drift)), name


def test_divided_sequences_have_the_losses_gradients_and_weights_of_whole_ones(trained: Any) -> None:
    copies, results = trained
    for name, of_ranks in results.items():
        native = train_native(name, copies)
        for found in of_ranks:
            assert_trained(name, found, native)


def test_all_ranks_have_the_same_bits(trained: Any) -> None:
    for name, (first, *others) in trained[1].items():
        for other in others:
            assert all(torch.equal(first["weights"][each], other["weights"][each]) for each in first["weights"]), name
            assert first["losses"] == other["losses"], name


#: Rank 0 and rank 1 have sequences together. Each tries batches that are refused, and trains on after each.
REFUSED = """
import json, os, torch
import torch.distributed as dist
from pathlib import Path
from torch.distributed.device_mesh import init_device_mesh
import megacompile
from sequence_jobs import model_of, rows

rank = int(os.environ["RANK"])
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("sequence",))
model = megacompile.stream(model_of("LlamaConfig"), device="cpu", mesh=mesh)
optimizer = megacompile.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
batch = rows(0, 0)
ones = torch.ones_like(batch["input_ids"])
left = {**batch, "attention_mask": ones.clone().index_fill_(1, torch.tensor([0]), 0)}
tried = {"other rows": rows(rank, 0), "no labels": {"input_ids": batch["input_ids"]}, "left padding": left,
         "longer on one rank": rows(0, 0, 16 + rank)}
said, losses = {}, []
shown = model.megacompile.program(batch), model.megacompile.explain(batch, hardware="8xh200")
for name, each in tried.items():
    try:
        model(**each).loss.backward()
    except Exception as error:
        said[name] = f"{type(error).__name__}: {error}"
    losses.append(float(model.megacompile.train_step(batch, optimizer)))
Path(os.environ["RESULTS"], f"{rank}.json").write_text(json.dumps([said, losses, shown[1]]))
model.megacompile.close()
"""


def test_batches_that_ranks_cannot_divide_are_refused_and_training_goes_on(start_job: Callable[..., Job]) -> None:
    for said, losses, shown in start_job(REFUSED, 2).results(120):
        assert "rank 1 has another batch than rank 0" in said["other rows"], said
        assert "pass the same batch to both" in said["longer on one rank"], said
        assert "pass labels" in said["no labels"] and said["no labels"].startswith("UnsupportedError"), said
        assert "pad on the right" in said["left padding"], said
        assert "2 x 8 tokens a step on each of 2 GPUs, 2 of which have 16 tokens of each sequence together" in shown, shown
        assert losses == sorted(losses, reverse=True) and len(losses) == 4, losses


#: Trains until it is killed.
ENDLESS = """
import os, time
from pathlib import Path
from torch.distributed.device_mesh import init_device_mesh
import megacompile
from megacompile.errors import RankError
from sequence_jobs import model_of, rows

rank, folder = int(os.environ["RANK"]), Path(os.environ["RESULTS"])
model = megacompile.stream(model_of("LlamaConfig"), device="cpu", mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=(
    "shard", "sequence")))
optimizer = megacompile.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
try:
    for step in range(10**6):
        model.megacompile.train_step(rows(0, step), optimizer)
        if step == 5:
            (folder / f"{rank}.begun").touch()
except RankError as error:
    (folder / f"{rank}.json").write_text(f'"{error}"')
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.nightly)])
def test_a_rank_that_is_killed_or_stopped_in_an_exchange_ends_the_other(start_job: Callable[..., Job],
                                                                         number: signal.Signals) -> None:
    job = start_job(ENDLESS, 2)
    limit = time.monotonic() + 60
    while len(list(job.folder.glob("*.begun"))) < 2:
        assert time.monotonic() < limit, job.errors(0)
        time.sleep(0.05)
    job.processes[1].send_signal(number)
    begun = time.monotonic()
    job.processes[0].wait(30)
    assert (job.folder / "0.json").exists(), job.errors(0)
    told = (job.folder / "0.json").read_text()
    assert "rank 1" in told and "start the job again from the last checkpoint" in told
    assert time.monotonic() - begun < 30
    job.processes[1].kill()
