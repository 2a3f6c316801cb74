"""Hosts that each have a copy of the model compute what one process does that has the rows of all their ranks."""
from __future__ import annotations

import fcntl
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import EXACT, JOBS, train_native
from processes import start
from test_ranks_parity import assert_trained, chosen, found_by

#: (hosts, ranks of all of them, job): those that every run of the tests includes. The others run on demand.
USUAL = ((2, 4, "qwen2"), (2, 4, "uneven rows"), (2, 4, "sums on the host"), (2, 4, "arrival on the device"), (2, 2, "tied"),
         (2, 2, "adapters"), (2, 2, "updated on the device"))
ALL = [*USUAL, *((2, 4, name) for name in JOBS if name not in EXACT and (2, 4, name) not in USUAL), (3, 3, "uneven rows"),
       (2, 2, "waves"), (2, 2, "slabs")]
AGAIN = ("uneven rows|again", "sums on the host|reference")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory,
            request: pytest.FixtureRequest) -> Callable[[int, int], Callable[..., Any]]:
    """By numbers of hosts and ranks: what each rank had at the end of a job. All processes of a test run share one job."""
    every = request.config.getoption("--nightly")
    jobs, again = (ALL, AGAIN) if every else (USUAL, AGAIN[:1])
    of_run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    shared = tmp_path_factory.getbasetemp().parent / f"hosts-{of_run}"
    shared.mkdir(exist_ok=True)

    def run(hosts: int, ranks: int) -> Callable[..., Any]:
        folder = shared / f"{hosts}x{ranks}"
        with (shared / f"{hosts}x{ranks}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                names = [f"{name}|" for *of, name in jobs if of == [hosts, ranks]] + (list(again) if ranks == 4 else [])
                start(Path(__file__).parents[1] / "support" / "jobs.py", ranks, folder, names, hosts).results(900)
        return functools.partial(found_by, folder)

    return run


@pytest.mark.parametrize(("hosts", "ranks", "name"), chosen(ALL, lambda job: job in USUAL))
def test_hosts_train_as_one_process_with_all_rows(trained: Callable[[int, int], Callable[..., Any]], hosts: int, ranks: int,
                                                  name: str) -> None:
    expected = train_native(name, ranks)
    for rank in range(ranks):
        assert_trained(trained(hosts, ranks)(name, rank), expected, rank)


@pytest.mark.parametrize(("hosts", "ranks", "name"), chosen(ALL, lambda job: job in USUAL))
def test_every_host_has_the_same_bits(trained: Callable[[int, int], Callable[..., Any]], hosts: int, ranks: int,
                                      name: str) -> None:
    found = [trained(hosts, ranks)(name, rank) for rank in range(ranks)]
    for other in found[1:]:
        assert other["norm"] == found[0]["norm"]
        assert "custom" in name or other["losses"] == found[0]["losses"]
        for part in ("weights", "moments", "gradients"):
            assert all(torch.equal(found[0][part][key], other[part][key]) for key in found[0][part] | other[part])


@pytest.mark.parametrize("again", chosen(AGAIN, lambda again: again == AGAIN[0]))
def test_repeated_runs_of_hosts_and_the_reference_interpreter_have_the_same_bits(
        trained: Callable[[int, int], Callable[..., Any]], again: str) -> None:
    name, _, kind = again.partition("|")
    for rank in range(4):
        one, other = trained(2, 4)(name, rank), trained(2, 4)(name, rank, kind)
        assert one["losses"] == other["losses"] and one["norm"] == other["norm"]
        for part in ("weights", "moments", "gradients"):
            assert all(torch.equal(one[part][key], other[part][key]) for key in one[part] | other[part])


#: What ranks of two hosts try that no host may do alone, and what the memory of a host is shared by.
SHARED = """
import json, os
from pathlib import Path
import engine, torch
from torch.distributed.device_mesh import init_device_mesh
from megacompile.errors import MegacompileError
from rank_models import *

found = {}

def refused(what, do):
    try:
        do()
    except MegacompileError as error:
        found[what] = f"{type(error).__name__}: {error}".splitlines()[0]

torch.distributed.init_process_group("gloo")
square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
refused("a part", lambda: streamed(mesh=square["shard"]))

model = streamed(mesh=square)
hosts = engine.rank_group(model).ranks.hosts
found["hosts"] = [hosts.rows, hosts.names]
program = model.megacompile.program(rows(0))
found["program"] = [program.ranks, program.hosts]
optimizer = adamw(model)
steps(model, optimizer, range(2))
kept, state = copies(model, optimizer)
first = steps(model, optimizer, range(2, 5))
if RANK >= 2:  # the first host's values count
    in_tiles = engine.tiling(model).position
    kept = {name: torch.zeros_like(tensor) if name in in_tiles else tensor for name, tensor in kept.items()}
    for each in state["state"].values():
        each["exp_avg"] = torch.ones_like(each["exp_avg"])
model.load_state_dict(kept)
optimizer.load_state_dict(state)
found["again"] = steps(model, optimizer, range(2, 5)) == first
model.megacompile.close()

model = streamed(bf16=True)
optimizer = adamw(model)
steps(model, optimizer, range(2))
master = torch.full((VOCABULARY, 16), 1 / 3 + RANK)
optimizer.set_master(model.table.weight, master)
found["master"] = optimizer.master(model.table.weight)[0, 0].item()
with torch.no_grad():
    if RANK == 3:
        model.head.weight.add_(1)
refused("weight", lambda: model(**rows(9)))
(Path(os.environ["RESULTS"]) / f"{RANK}.json").write_text(json.dumps(found))
"""


def test_hosts_take_over_what_the_first_one_loads_and_refuse_other_writes(launch: Callable[..., list[Any]]) -> None:
    results = launch(SHARED, 4, hosts=2)
    for rank, found in enumerate(results):
        assert "a job with 4 ranks" in found["a part"] or "different meshes" in found["a part"]
        assert found["hosts"] == [[[0, 1], [2, 3]], ["node0", "node1"]] and found["program"] == [2, 2]
        assert found["again"], rank
        where = "" if rank == 3 else "rank 3 on host node1 has failed with UnsupportedError: "
        assert f"{where}head.weight was changed outside megacompile.AdamW" in found["weight"]
        assert found["master"] == pytest.approx(1 / 3, rel=1e-7)


#: On one machine, a mesh of two rows is followed.
MESHED = """
import json, os
from pathlib import Path
import engine, torch
from torch.distributed.device_mesh import init_device_mesh
from rank_models import *

torch.distributed.init_process_group("gloo")
found = {}
for shape in ((2, 2), (4,), None):
    model = streamed(mesh=None if shape is None else init_device_mesh("cpu", shape))
    hosts = engine.rank_group(model).ranks.hosts
    found[str(shape)] = [hosts.count, hosts.ranks, hosts.beside, steps(model, adamw(model), range(3))]
    model.megacompile.close()
(Path(os.environ["RESULTS"]) / f"{RANK}.json").write_text(json.dumps(found))
"""


def test_a_mesh_on_one_machine_is_followed(launch: Callable[..., list[Any]]) -> None:
    for found in launch(MESHED, 4):
        (*hosts, losses), (*flat, others), (*none, default) = (found[shape] for shape in ("(2, 2)", "(4,)", "None"))
        assert hosts == [2, 2, 2] and flat == none == [1, 4, 1]
        assert others == default and losses == pytest.approx(others, rel=1e-5)


#: Ranks of hosts that cannot train together.
UNEVEN = """
import json, os
from pathlib import Path
from rank_models import *
try:
    streamed()
except Exception as error:
    text = f"{type(error).__name__}: {error}"
(Path(os.environ["RESULTS"]) / f"{RANK}.json").write_text(json.dumps(text))
"""


def test_hosts_with_different_numbers_of_ranks_are_refused_on_every_rank(launch: Callable[..., list[Any]]) -> None:
    for found in launch(UNEVEN, 3, hosts=2):
        assert found.startswith("UnsupportedError: the hosts have different numbers of ranks (node0 has 2, node1 has 1), and")
        assert "start as many processes on every host (torchrun --nproc-per-node)" in found


#: Loads a checkpoint if there is one, trains to the given step, and saves there while two more steps run.
RESUMED = """
import json, os, sys
from pathlib import Path
from rank_models import *
from megacompile.checkpoint import CheckpointWriter, load_checkpoint

folder, start, stop = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = streamed(bf16=True)
optimizer = adamw(model)
extra = load_checkpoint(folder, model, optimizer) if start else None
assert extra is None or extra == {"step": start}
found = {"losses": steps(model, optimizer, range(start, stop))}
with CheckpointWriter(folder, model, optimizer) as writer:
    writer.save({"step": stop})
    later = steps(model, optimizer, range(stop, stop + 2))
    path = writer.wait()
load_checkpoint(folder, model, optimizer)
found["same"] = steps(model, optimizer, range(stop, stop + 2)) == later  # to the bit
found["path"] = path.name
(Path(os.environ["RESULTS"]) / f"{RANK}.json").write_text(json.dumps(found))
model.megacompile.close()
"""


def test_a_checkpoint_of_hosts_resumes_in_one_process_and_back(launch: Callable[..., list[Any]], tmp_path: Path) -> None:
    """2 hosts of 2 ranks -> 1 process -> 2 hosts of 2 ranks, with the losses of a run that never stopped."""
    from rank_models import adamw, steps, streamed

    folder, losses = str(tmp_path / "run"), []
    for number, (ranks, hosts) in enumerate(((4, 2), (1, 1), (4, 2))):
        found = launch(RESUMED, ranks, folder, str(3 * number), str(3 * number + 3), hosts=hosts)
        assert all(each == found[0] for each in found) and found[0]["same"]
        losses += found[0]["losses"]
    model = streamed(bf16=True)
    assert losses == pytest.approx(steps(model, adamw(model), range(9)), rel=5e-3)
    model.megacompile.close()
