"""A copy of the model that hosts divide: the bits of one host, memory for a host's own shards, checkpoints for any number of
hosts.
"""
from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from jobs import JOBS
from processes import Job, start
from test_published_checkpoints import in_float8, mixture
from test_ranks_parity import chosen, found_by
from torch.utils import _pytree as pytree

from megacompile.checkpoint import latest_checkpoint
from megacompile.checkpoint.loading import read_extra

JOB = Path(__file__).parents[1] / "support" / "jobs.py"
#: (ranks, job): those that every run of the tests includes. The others run on demand.
USUAL = ((2, "tied"), (2, "qwen3"), (2, "adapters"), (2, "sums on the host"), (2, "matrices in 8 bits"), (4, "expert pieces"))
ALL = [*USUAL, *((2, name) for name in JOBS if (2, name) not in USUAL), (4, "qwen2"), (4, "uneven rows"),
       (4, "arrival on the device"), (4, "matrices of experts")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """What each rank had at the end of a job, on one host or on two."""
    jobs: Sequence[tuple[int, str]] = ALL if request.config.getoption("--nightly") else USUAL
    folders: dict[tuple[int, int], Path] = {}

    def run(hosts: int, ranks: int, name: str) -> list[Any]:
        if (hosts, ranks) not in folders:
            folders[hosts, ranks] = tmp_path_factory.mktemp(f"divided-{hosts}x{ranks}")
            names = [f"{each}|" for count, each in jobs if count == ranks]
            start(JOB, ranks, folders[hosts, ranks], names, hosts, JOB_DIVIDED="1").results(900)
        return [found_by(folders[hosts, ranks], name, rank) for rank in range(ranks)]

    return run


@pytest.mark.parametrize(("ranks", "name"), chosen(ALL, lambda job: job in USUAL))
def test_a_copy_divided_among_hosts_has_the_bits_of_one_host(trained: Callable[..., list[Any]], ranks: int, name: str) -> None:
    for one, other in zip(trained(1, ranks, name), trained(2, ranks, name), strict=True):
        assert one["losses"] == other["losses"] and one["norm"] == other["norm"]
        for part in ("weights", "moments"):
            assert one[part].keys() == other[part].keys()
            assert all(torch.equal(one[part][key], other[part][key]) for key in one[part]), part


#: What no rank can do with a part of the model, and what all ranks can do together.
TOGETHER = """
import copy, json, os, sys
from pathlib import Path
import engine, torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import TrainingArguments
from megacompile.errors import MegacompileError
from megacompile.trainers.trainer_arguments import check_arguments
from rank_models import *

found = {}

def refused(what, do):
    try:
        do()
    except MegacompileError as error:
        found[what] = f"{type(error).__name__}: {error}".splitlines()[0]

torch.distributed.init_process_group("gloo")
shape = tuple(map(int, sys.argv[1].split("x")))
mesh = init_device_mesh("cpu", shape)
refused("disk", lambda: streamed(mesh=mesh, disk=os.environ["RESULTS"]))
model = streamed(bf16=True, mesh=mesh)
hosts = engine.rank_group(model).ranks.hosts
found["hosts"] = [hosts.copies, hosts.ranks, hosts.count, hosts.spread]
program = model.megacompile.program(rows(0))
found["program"] = [program.ranks, program.hosts, program.spread]
optimizer = adamw(model)
found["losses"] = steps(model, optimizer, range(2))
kept, state = copies(model, optimizer)
with torch.no_grad():
    found["evaluated"] = float(model(**{name: each[:1 + RANK % 2, :9 - RANK] for name, each in rows(7).items()}))
first = steps(model, optimizer, range(2, 5))
found["more"] = first
model.load_state_dict(kept)
optimizer.load_state_dict(state)
found["again"] = steps(model, optimizer, range(2, 5)) == first
weight = model.table.weight
loss = model(**rows(0))
loss.backward()
refused("data", lambda: weight.data.sum())
refused("read", lambda: weight + 1)
if hosts.spread > 1:
    refused("write", lambda: weight.detach().zero_())
refused("copy", lambda: copy.deepcopy(model))
refused("gradient", lambda: weight.grad.norm())
refused("state", lambda: optimizer.state[weight]["exp_avg"].sum())
refused("master", lambda: optimizer.master(weight))
refused("trainer", lambda: check_arguments(TrainingArguments(os.environ["RESULTS"], use_cpu=True), engine.of(model)))
found["told"] = [list(weight.shape), str(weight.dtype), weight.requires_grad, weight.grad is not None]
optimizer.step()
optimizer.zero_grad()

(Path(os.environ["RESULTS"]) / f"{RANK}.json").write_text(json.dumps(found))
model.megacompile.close()
"""


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("together")
    (folder / "script.py").write_text(TOGETHER)
    return start(folder / "script.py", 2, folder, ["2"], 2).results()


def test_ranks_of_all_hosts_evaluate_and_load_together(together: list[Any]) -> None:
    for found in together:
        assert found["hosts"] == [1, 2, 2, 2] and found["program"] == [2, 1, 2]
        assert found["again"] and found["evaluated"] > 0
        assert "disk keeps moments in files of one host" in found["disk"] and "leave disk out" in found["disk"]


def test_what_a_host_has_a_part_of_is_refused_by_name(together: list[Any]) -> None:
    for found in together:
        assert "saved by all ranks together, and trainers save it on one: write the loop" in found["trainer"]
        assert found["told"] == [[64, 16], "torch.bfloat16", True, True]
        for what in ("data", "read", "write", "copy", "gradient", "state", "master"):
            of = {"gradient": "the gradient of table.weight", "state": "the exp_avg of table.weight"}.get(what, "table.weight")
            assert found[what].startswith(f"UnsupportedError: {of} is divided among hosts"), what
            assert "call state_dict() o" in found[what]


@pytest.mark.nightly(held_by="tests/ir/test_hosts.py::test_several_copies_may_be_divided_among_hosts")
def test_two_copies_may_each_be_divided(launch: Callable[..., list[Any]]) -> None:
    two, one = (launch(TOGETHER, 4, "2x2", hosts=hosts) for hosts in (4, 2))
    for found, whole in zip(two, one, strict=True):
        assert found["hosts"] == [2, 2, 4, 2] and whole["hosts"] == [2, 2, 2, 1] and found["again"]
        assert (found["losses"], found["more"]) == (whole["losses"], whole["more"])


#: The pages of a host's shared memory after some steps, beside those that its shards need.
PAGES = """
import ctypes, json, os, sys
from pathlib import Path
import engine, torch
from torch.distributed.device_mesh import init_device_mesh
import megacompile
from jobs import model_of
from megacompile.runtime.memory.divided import memory_of
from rank_models import RANK, SIZE

def pages(memories):
    found = set()
    for memory in memories:
        start, size = memory.data_ptr() // 4096 * 4096, memory.nbytes
        count = -(-(memory.data_ptr() + size - start) // 4096)
        there = (ctypes.c_ubyte * count)()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(4096 * count), there) == 0
        found |= {start // 4096 + number for number, each in enumerate(there) if each & 1}
    return len(found)

torch.distributed.init_process_group("gloo")
model = model_of("Qwen2Config", vocab_size=4096, hidden_size=256, intermediate_size=512, tie_word_embeddings=False)
model = megacompile.stream(model.to(torch.bfloat16), device="cpu", compile=False, mesh=init_device_mesh("cpu", (SIZE,)))
optimizer = megacompile.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
ids = torch.randint(0, 4096, (2, 9), generator=torch.Generator().manual_seed(RANK))
found = {}

def count(when):
    model.megacompile.synchronize()
    torch.distributed.barrier()
    parts = ("weights", "gradients", "remainder", "moments")
    tiles = engine.store(model).tiles.values()
    whole = [memory for tile in tiles for memory in tile.memories(parts)]
    found[when] = [pages(whole), sum(-(-m.nbytes // 4096) for m in whole), len(whole),
                   sum(each.nbytes for tile in tiles for each in memory_of(tile, parts, tile.here))]

for number in range(2):
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
count("trained")
state, moments = model.state_dict(), optimizer.state_dict()
model.load_state_dict(state)
optimizer.load_state_dict(moments)
count("loaded")
model.eval()
with torch.no_grad():
    ids = ids[:1 + RANK, :9 - RANK]  # of another shape on each rank
    evaluated = model(input_ids=ids, labels=ids)
torch.save((ids, evaluated.loss, evaluated.logits), Path(sys.argv[1]) / f"{RANK}.pt")
model.save_pretrained(Path(sys.argv[1]) / "saved")
count("saved")
(Path(os.environ["RESULTS"]) / f"{RANK}.json").write_text(json.dumps(found))
if RANK == 0:
    torch.save(state, Path(sys.argv[1]) / "state.pt")
"""


def test_a_host_takes_memory_for_its_own_shards_alone(launch: Callable[..., list[Any]], tmp_path: Path) -> None:
    for found in launch(PAGES, 2, str(tmp_path), hosts=2):
        for taken, whole, memories, own in found.values():
            assert own <= 4096 * taken <= own + 2 * 4096 * memories * 8  # parameters and runs begin within pages
            assert taken < 0.6 * whole
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto").eval()
    values = saved.state_dict()
    assert all(torch.equal(values[name], value) for name, value in torch.load(tmp_path / "state.pt").items())
    for rank in range(2):
        ids, loss, logits = torch.load(tmp_path / f"{rank}.pt")
        expected = saved(input_ids=ids, labels=ids)
        torch.testing.assert_close(loss, expected.loss.float(), rtol=1e-2, atol=0)
        torch.testing.assert_close(logits, expected.logits, rtol=2e-2, atol=2e-2)


#: Loads a checkpoint if there is one, trains to the given step, and saves there while two more steps run.
RESUMED = """
import json, os, sys, torch
from pathlib import Path
from torch.distributed.device_mesh import init_device_mesh
from rank_models import *
from megacompile.checkpoint import CheckpointWriter, load_checkpoint

folder, start, stop, state_dtype = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
mesh = None
if SIZE > 1:
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (SIZE,))
model = streamed(bf16=True, mesh=mesh)
optimizer = adamw(model, state_dtype=state_dtype)
extra = load_checkpoint(folder, model, optimizer) if start else None
assert extra is None or extra == {"step": start}
found = {"losses": steps(model, optimizer, range(start, stop))}
with CheckpointWriter(folder, model, optimizer) as writer:
    writer.save({"step": stop})
    later = steps(model, optimizer, range(stop, stop + 2))
    path = writer.wait()
load_checkpoint(folder, model, optimizer)
found["same"] = steps(model, optimizer, range(stop, stop + 2)) == later  # to the bit
found["later"] = later
found["files"] = sorted(each.name for each in path.iterdir())
(Path(os.environ["RESULTS"]) / f"{RANK}.json").write_text(json.dumps(found))
model.megacompile.close()
"""


@pytest.mark.parametrize("state_dtype", ["float32", "8bit"])
def test_a_checkpoint_is_written_by_shards_and_read_by_any_number_of_hosts(
        launch: Callable[..., list[Any]], tmp_path: Path, state_dtype: str) -> None:
    """With two ranks on two hosts, on one, and on two again: to the bit. Then in one process, and four on two hosts."""
    def run(number: int, ranks: int, hosts: int, folder: Path) -> Any:
        found = launch(RESUMED, ranks, str(folder), str(2 * number), str(2 * number + 2), state_dtype, hosts=hosts)
        assert all(each == found[0] for each in found) and found[0]["same"]
        return found[0]

    plan = ((2, 2), (2, 1), (2, 2), (1, 1), (4, 2))
    moved = [run(number, *of, tmp_path / "moved") for number, of in enumerate(plan)]
    stayed = [run(number, 2, 1, tmp_path / "stayed") for number in range(3)]
    for one, other in zip(moved[:3], stayed, strict=True):
        assert (one["losses"], one["later"]) == (other["losses"], other["later"])
    for before, after in itertools.pairwise(moved):
        assert after["losses"] == pytest.approx(before["later"], rel=5e-3)
    names = [sum(each.startswith("tensors-") for each in run["files"]) for run in moved]
    assert names[0] == names[2] == names[4] > names[1] == names[3]


#: Trains from the latest checkpoint to the last step, and saves after each step.
KILLED = """
import json, os, sys, torch
from pathlib import Path
from torch.distributed.device_mesh import init_device_mesh
from megacompile.checkpoint import CheckpointWriter, latest_checkpoint, load_checkpoint
from rank_models import *

folder, stop = Path(sys.argv[1]), int(sys.argv[2])
torch.distributed.init_process_group("gloo")
model = streamed(bf16=True, mesh=init_device_mesh("cpu", (SIZE,)))
optimizer = adamw(model)
begin = load_checkpoint(folder, model, optimizer)["step"] if latest_checkpoint(folder) else 0
with CheckpointWriter(folder, model, optimizer, keep=2) as writer:
    for step in range(begin, stop):
        steps(model, optimizer, [step], whole=step % 2 == 0)
        writer.save({"step": step + 1})
        (Path(os.environ["RESULTS"]) / "training").touch()
    writer.wait()
weights, state = copies(model, optimizer)
torch.save((weights, state["state"]), Path(os.environ["RESULTS"]) / f"{RANK}.pt")
(Path(os.environ["RESULTS"]) / f"{RANK}.json").write_text(json.dumps(begin))
"""
STOP, KILLS = 40, 20


@pytest.mark.nightly(held_by="tests/system/test_ranks_divided.py::"
                             "test_a_checkpoint_is_written_by_shards_and_read_by_any_number_of_hosts")
def test_a_host_that_is_killed_at_random_moments_loses_no_bit(start_job: Callable[..., Job], tmp_path: Path) -> None:
    """One host of two is killed over and over. What resumes from the last checkpoint ends as a run that was never killed."""
    def run(folder: Path) -> Job:
        return start_job(KILLED, 2, str(folder), str(STOP), hosts=2)

    def trains(job: Job) -> None:
        while not (job.folder / "training").exists() and job.processes[0].poll() is None:
            time.sleep(0.01)

    whole = run(tmp_path / "whole")
    trains(whole)
    begun = time.monotonic()
    whole.results()
    lasts, draw = time.monotonic() - begun, random.Random(0)
    kills, resumed, compared = 0, set[int](), 0
    while kills < KILLS:
        folder, ended = tmp_path / f"killed {compared}", False
        while not ended:
            job = run(folder)
            if started := draw.random() < 0.8:
                trains(job)
            if kills < KILLS:
                time.sleep(draw.random() * (lasts if started else 4))
                # While the processes find each other, torchrun ends those that are left.
                for process in job.processes if not started else job.processes[draw.randrange(2):][:1]:
                    process.kill()
            ended = job.wait(90) == [0, 0]
            kills += not ended
            latest = latest_checkpoint(folder)
            resumed.add(0 if latest is None else read_extra(folder)["step"])
        for rank in range(2):
            one, other = (dict(pytree.tree_flatten_with_path(torch.load(each.folder / f"{rank}.pt"))[0])
                          for each in (whole, job))
            assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
        compared += 1
    assert len(resumed) > 5, "kills at few different steps"


#: Loads a checkpoint of transformers, and a new model whose weights are drawn.
LOADED = """
import json, os, sys, torch
from pathlib import Path
from torch.distributed.device_mesh import init_device_mesh
import engine, megacompile
from rank_models import RANK, SIZE

torch.distributed.init_process_group("gloo")
mesh = init_device_mesh("cpu", (SIZE,))
found = {}
for name in ("plain", "codes"):
    model = megacompile.from_pretrained(Path(sys.argv[1]) / name, device="cpu", dtype="bfloat16", compile=False, mesh=mesh)
    store = engine.store(model)
    remainders = {}
    for tile_name, tile in store.tiles.items():
        with store.whole_on_every_host(tile_name, ("remainder",), engine.rank_group(model).ranks, "test"):
            remainders[tile_name] = tile.remainder.clone()
    found[name] = model.state_dict(), remainders
    model.megacompile.close()
torch.save(found, os.environ["RESULTS"] + f"/{RANK}.pt")
(Path(os.environ["RESULTS"]) / f"{RANK}.json").write_text(json.dumps(os.environ["RESULTS"]))
"""


def test_each_host_reads_its_runs_of_a_checkpoint(launch: Callable[..., list[Any]], tmp_path: Path) -> None:
    """In bf16, and in FP8 with scales of blocks, as DeepSeek-V3 is published: experts one by one."""
    mixture(tmp_path / "plain")
    mixture(tmp_path / "codes")
    in_float8(tmp_path / "codes", (16, 16))
    one, two = (launch(LOADED, 2, str(tmp_path), hosts=hosts) for hosts in (1, 2))
    for rank in range(2):
        expected, found = (torch.load(f"{folder[rank]}/{rank}.pt") for folder in (one, two))
        for name in ("plain", "codes"):
            for whole, divided in zip(expected[name], found[name], strict=True):
                assert whole.keys() == divided.keys() and all(torch.equal(whole[key], divided[key]) for key in whole)
