"""A rank that ends, fails, stalls or differs ends the others within seconds, with its name and the cause."""
from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_jobs import RAISED, SCRIPT, began, ended, nightly
from processes import Job, start

from megacompile.errors import RankError
from megacompile.system.host_memory import SharedMemory


@pytest.mark.parametrize(("fault", "says"), [
    ("raises", "rank 1 (process"), nightly("exits", "rank 1 (process"),
    ("gather", "rank 1 has failed with LaneError: gather failed in lane collective: RuntimeError: power cut"),
    nightly("late", "rank 0 has waited for 3 s for rank 1: find out what the other ranks do"),
    ("loop, other call", "rank 1 calls train_step while rank 0 calls forward: make the same calls in the same order")])
def test_a_rank_that_fails_ends_the_others_with_its_name(start_job: Callable[..., Job], fault: str, says: str) -> None:
    job = start_job(SCRIPT, 2, fault)
    begun = began(job)
    codes = job.wait(60)
    other = ended(job, 0)
    assert codes[0] == RAISED, job.errors(0)
    assert other["error"] == "RankError" and says in other["message"].splitlines()[0], other
    assert fault == "loop, other call" or "start the job again from the last checkpoint" in other["message"]
    assert other["at"] - begun < 30


def test_a_rank_whose_update_fails_says_so_though_the_other_has_ended_since(start_job: Callable[..., Job]) -> None:
    job = start_job(SCRIPT, 2, "loop, update")
    began(job)
    assert job.wait(60) == [0, RAISED], job.errors(1)
    assert ended(job, 1)["message"].startswith("update failed in lane cpu: RuntimeError: power cut"), ended(job, 1)


#: Ops that only programs of several ranks have. One fails in every run, the others on demand.
OF_SEVERAL_RANKS = ("pack_shard", "prefetch_shard", "gather_resident", "gather_momentum", "momentum", "reduce_scatter",
                    "share_norms", "share_host_norms", "total_loss", "share_loss", "announce")


@pytest.mark.parametrize("op", [op if op == "prefetch_shard" else nightly(op) for op in OF_SEVERAL_RANKS])
def test_an_op_of_several_ranks_that_fails_ends_all_ranks(start_job: Callable[..., Job], op: str) -> None:
    job = start_job(SCRIPT, 2, op)
    began(job)
    codes = job.wait(60)
    assert codes == [RAISED, RAISED], job.errors(0) + job.errors(1)
    assert ended(job, 0)["message"].startswith(f"rank 1 has failed with LaneError: {op} failed in lane "), ended(job, 0)


@pytest.mark.parametrize(("fault", "says"), [
    ("version", "another version than rank 0"), ("other model", "another model than rank 0"),
    nightly("other options", "another program than rank 0"),
    nightly("cannot be captured", "rank 1 has failed with CaptureError")])
def test_ranks_that_differ_are_refused_before_the_first_step(start_job: Callable[..., Job], fault: str, says: str) -> None:
    job = start_job(SCRIPT, 2, fault)
    codes = job.wait(90)
    found = ended(job, 0)
    assert codes[0] == RAISED, job.errors(0)
    assert found["error"] == "RankError" and says in found["message"].splitlines()[0], found
    assert "has failed" in says or "start all ranks with the same model, options and versions" in found["message"]


@pytest.mark.parametrize(("number", "says"), [(signal.SIGKILL, "has ended"), (signal.SIGSTOP, "was stopped by a signal")])
def test_a_rank_that_is_killed_or_stopped_ends_the_others(start_job: Callable[..., Job], number: signal.Signals,
                                                          says: str) -> None:
    job = start_job(SCRIPT, 2, "loop")
    began(job)
    time.sleep(0.5)
    job.processes[1].send_signal(number)
    sent = time.time()
    code = job.processes[0].wait(40)
    found = ended(job, 0)
    assert code == RAISED, job.errors(0)
    assert found["error"] == "RankError" and f"rank 1 (process {job.processes[1].pid}) {says}" in found["message"], found
    assert found["at"] - sent < 30


def test_a_rank_that_waits_in_c_for_one_that_was_stopped_prints_the_error_and_ends(start_job: Callable[..., Job]) -> None:
    job = start_job(SCRIPT, 2, "waits in C")
    began(job)
    while not (job.folder / "waits").exists():
        assert all(process.poll() is None for process in job.processes), job.errors(0) + job.errors(1)
        time.sleep(0.05)
    job.processes[1].send_signal(signal.SIGSTOP)
    sent = time.monotonic()
    assert job.processes[0].wait(40) == RAISED
    assert time.monotonic() - sent < 30
    *_, last = job.errors(0).splitlines()
    cause = f"megacompile.errors.RankError: rank 1 (process {job.processes[1].pid}) was stopped by a signal: "
    assert last.startswith(cause), last
    assert "start the job again from the last checkpoint" in last and "ctypes.CDLL(None).sleep(120)" in job.errors(0)
    assert not (job.folder / "0.json").exists(), "nothing was raised"


def test_nothing_of_the_shared_memory_is_left(start_job: Callable[..., Job], tmp_path: Path) -> None:
    """It has no name in /dev/shm, and ends with the processes that map it."""
    before = set(Path("/dev/shm").iterdir())
    job = start_job(SCRIPT, 2, "loop")
    began(job)
    maps = Path(f"/proc/{job.processes[1].pid}/maps").read_text()
    assert "/memfd:megacompile (deleted)" in maps
    for process in job.processes:
        process.kill()
        process.wait()
    assert set(Path("/dev/shm").iterdir()) <= before


#: Ends all groups while one model lives, with an update in flight, and before another is closed. With an argument, it leaves
#: the groups to megacompile.
ENDS = """
import atexit, json, os, sys
atexit.register(lambda: print("initialized:", torch.distributed.is_initialized()))  # runs last
from pathlib import Path
import torch
import megacompile
from jobs import even
from rank_decoder import decoder

rank = int(os.environ["RANK"])
models = [megacompile.stream(decoder(), layers="layers", device="cpu", compile=False) for _ in range(2)]
for model in models:
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-3)
    model(**even(rank, 0)).backward()
    optimizer.step()
if sys.argv[1:] == []:
    torch.distributed.destroy_process_group()
models.pop().megacompile.close()
(Path(os.environ["RESULTS"]) / f"{rank}.json").write_text(json.dumps("done"))
"""


@pytest.mark.parametrize("arguments", [[], ["left"]])
@pytest.mark.parametrize("fork", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["forked", "interpreter"])
def test_a_script_ends_quietly_whether_or_not_it_ends_the_process_groups(
        tmp_path: Path, arguments: list[str], fork: bool) -> None:
    """A forked process runs its exit handlers, but its interpreter does not end. `test_exit.py` ends one."""
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    job = start(script, 2, tmp_path, arguments, fork=fork)
    assert job.results() == ["done", "done"]
    for rank in range(2):
        said = job.errors(rank)
        # A forked process has imported megacompile before it asks to print this, which is printed before groups are ended.
        assert "Error" not in said and said.endswith(f"initialized: {fork and arguments == ['left']}\n"), said


def test_memory_of_a_process_that_has_ended_is_refused() -> None:
    memory = SharedMemory({"piece": 64})
    _, descriptor = memory.address
    with pytest.raises(RankError, match=r"cannot be opened .*run all ranks of a host as the same user"):
        SharedMemory({"piece": 64}, (2**22 + 1, descriptor))
    memory.close()
