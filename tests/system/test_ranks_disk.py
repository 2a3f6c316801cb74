"""Moments on disk with several ranks: each has a file with its shares, the bits are those of memory, faults end all ranks."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_jobs import RAISED, began, ended
from processes import Job

#: Trains with moments in memory, on disk, and some on disk, and compares what all of them have at the end.
SAME_BITS = """
import json, os, sys
from pathlib import Path
import torch
import engine, megacompile
from rank_models import *
from saving_jobs import alike, everything

folder, found = Path(sys.argv[1]), {}

def run(whole, options, **stream):
    model = streamed(bf16=True, **stream)
    optimizer = adamw(model, **options)
    losses = steps(model, optimizer, range(4), whole)
    for key in ("exp_avg", "exp_avg_sq"):
        value = optimizer.state[model.head.weight][key]
        optimizer.state[model.head.weight][key] = value.clone()
    losses += steps(model, optimizer, range(4, 6), whole)
    values, stats = everything(model, optimizer), model.megacompile.stats
    planned = {slot.name: slot.bytes for slot in engine.trained(model).program.slots.values()}
    tiles = engine.trained(model).program.tiles
    model.megacompile.close()
    once, reads = sum(tile.disk_bytes for tile in tiles.values()), 1 + bool(stream.get("deferred_moments"))
    assert stats["disk_bytes"] == once and stats["disk_bytes_written"] == 6 * once, (stats, once)
    assert stats["disk_bytes_read"] == 6 * reads * once
    assert ("MB0" in planned) == (stream.get("disk_state") == "all")
    return losses, values, once

for whole in (False, True):
    for name, options in (("float32", {}), ("bfloat16", {"state_dtype": "bfloat16"}), ("8bit", {"state_dtype": "8bit"}),
                          ("arrival", {"overlap": "backward", "max_grad_norm": None})):
        losses, values, nothing = run(whole, options)
        for which in ("all", ("layers.0", "layers.2"), "later"):
            more = {"disk_state": "all", "deferred_moments": True} if which == "later" else {"disk_state": which}
            if which == "later" and name == "arrival":
                continue
            ours = run(whole, options, disk=folder / "state", **more)
            assert nothing == 0 < ours[2]
            found[f"{name}, {whole}, {which}"] = ours[0] == losses and alike(ours[1], values)
found["left"] = sorted(os.listdir(folder / "state"))
(Path(os.environ["RESULTS"]) / f"{RANK}.json").write_text(json.dumps(found))
"""


@pytest.mark.parametrize(("ranks", "hosts"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.nightly(
    held_by="tests/system/test_ranks_disk.py::test_a_loaded_state_is_on_the_disks_of_all_hosts"))])
def test_ranks_with_moments_on_disk_have_the_bits_of_ranks_with_moments_in_memory(
        launch: Callable[..., list[Any]], tmp_path: Path, ranks: int, hosts: int) -> None:
    one, *others = launch(SAME_BITS, ranks, str(tmp_path), hosts=hosts)
    assert all(one == other for other in others) and one.pop("left") == [] and len(one) == 22
    assert all(one.values()), one


#: Trains two steps, and two more; then loads the state of the first two, of which the second host has other moments. Each rank
#: says whether it reads that state.
LOADED = """
import json, os, sys
from pathlib import Path
import torch
from rank_models import *

model = streamed(bf16=True, disk=sys.argv[1], disk_state="all")
optimizer = adamw(model)
steps(model, optimizer, range(2))
saved = optimizer.state_dict()
kept = {key: {name: torch.as_tensor(value).clone() for name, value in each.items()} for key, each in saved["state"].items()}
steps(model, optimizer, range(2, 4))

def same():
    now = optimizer.state_dict()["state"]
    return all(torch.equal(torch.as_tensor(now[key][name]), value)
               for key, each in kept.items() for name, value in each.items())

changed = not same()
given = kept if RANK < 2 else {key: {name: value if name == "step" else torch.zeros_like(value) for name, value in each.items()}
                               for key, each in kept.items()}
optimizer.load_state_dict({**saved, "state": given})
(Path(os.environ["RESULTS"]) / f"{RANK}.json").write_text(json.dumps([changed, same()]))
model.megacompile.close()
"""


def test_a_loaded_state_is_on_the_disks_of_all_hosts(launch: Callable[..., list[Any]], tmp_path: Path) -> None:
    """It is the first host's. Each rank reads the files of its own host."""
    assert launch(LOADED, 4, str(tmp_path), hosts=2) == 4 * [[True, True]]


#: Loads a checkpoint if there is one, trains to the given step, and saves there while two more steps run.
RESUMED = """
import json, os, sys
from pathlib import Path
import torch
from rank_models import *
from saving_jobs import alike, everything
from megacompile.checkpoint import CheckpointWriter, load_checkpoint

folder, start, stop, disk = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
model = streamed(bf16=True, **({"disk": disk, "disk_state": "all"} if disk else {}))
optimizer = adamw(model)
extra = load_checkpoint(folder, model, optimizer) if start else None
assert extra is None or extra == {"step": start}
found = {"losses": steps(model, optimizer, range(start, stop))}
saved = everything(model, optimizer)
with CheckpointWriter(folder, model, optimizer, copy_memory=int(sys.argv[5])) as writer:
    writer.save({"step": stop})
    later = steps(model, optimizer, range(stop, stop + 2))  # updates wait until their tile is read, or copy it
    writer.wait()
load_checkpoint(folder, model, optimizer)
found["restored"] = alike(everything(model, optimizer), saved)
found["same"] = steps(model, optimizer, range(stop, stop + 2)) == later
(Path(os.environ["RESULTS"]) / f"{RANK}.json").write_text(json.dumps(found))
model.megacompile.close()
"""


@pytest.mark.nightly(held_by="tests/system/test_ranks_saving.py::test_a_checkpoint_resumes_on_another_number_of_ranks")
def test_a_checkpoint_resumes_on_another_number_of_ranks_with_a_disk_or_without(
        launch: Callable[..., list[Any]], tmp_path: Path) -> None:
    """1 -> 2 -> 2 -> 1 -> 2: the losses are those of the same numbers of ranks without a disk, to the bit."""
    losses: dict[bool, list[Any]] = {True: [], False: []}
    for with_disk, of_kind in losses.items():
        for number, (ranks, on_disk) in enumerate(((1, True), (2, True), (2, False), (1, True), (2, True))):
            disk = str(tmp_path / "state") if on_disk and with_disk else ""
            found = launch(RESUMED, ranks, str(tmp_path / str(with_disk)), str(2 * number), str(2 * number + 2), disk,
                           str((number % 2) << 30))
            assert all(each == found[0] for each in found) and found[0]["same"] and found[0]["restored"], found
            of_kind += found[0]["losses"]
    assert losses[True] == losses[False] and len(losses[True]) == 10


#: Trains with moments on disk until the drive of rank 1 fails. Each rank writes how it ended.
FAILS = """
import errno, json, os, sys, time
from pathlib import Path
import torch
import megacompile
from rank_models import *

folder, how = Path(os.environ["RESULTS"]), sys.argv[2]

def fails(*given):
    raise OSError(errno.EIO, os.strerror(errno.EIO))

try:
    model = streamed(disk=sys.argv[1], disk_state="all")
    if how == "space" and RANK == 1:
        os.posix_fallocate = lambda *given: (_ for _ in ()).throw(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    optimizer = adamw(model)
    for step in range(10**6):
        if RANK == 1 and step == 3:
            (folder / "begun").write_text(str(time.time()))
            if how in ("preadv", "pwritev"):
                setattr(os, how, fails)
        steps(model, optimizer, (step,), whole=True)
except BaseException as error:
    (folder / f"{RANK}.json").write_text(json.dumps({"error": type(error).__name__, "message": str(error), "at": time.time()}))
    raise
"""


@pytest.mark.parametrize(("call", "says"), [
    ("preadv", "reading the optimizer state of"), ("pwritev", "writing the optimizer state of")])
def test_a_drive_of_one_rank_that_fails_ends_all_ranks_with_the_cause(
        start_job: Callable[..., Job], tmp_path: Path, call: str, says: str) -> None:
    job = start_job(FAILS, 2, str(tmp_path / "state"), call)
    begun = began(job)
    assert job.wait(60) == [RAISED, RAISED], job.errors(0) + job.errors(1)
    one, other = ended(job, 0), ended(job, 1)
    assert other["error"] == "DiskError" and other["message"].startswith(says), other
    assert "check the drive and start the job again from the last checkpoint" in other["message"]
    assert one["error"] == "RankError" and f"rank 1 has failed with DiskError: {says}" in one["message"], one
    assert one["at"] - begun < 30 and list((tmp_path / "state").iterdir()) == []


def test_too_little_space_for_one_rank_is_an_error_of_all_and_nothing_is_left(
        start_job: Callable[..., Job], tmp_path: Path) -> None:
    job = start_job(FAILS, 2, str(tmp_path / "state"), "space")
    assert job.wait(90) == [RAISED, RAISED], job.errors(0) + job.errors(1)
    one, other = ended(job, 0), ended(job, 1)
    assert other["error"] == one["error"] == "DiskError" and "optimizer state on disk takes" in other["message"], (one, other)
    assert "rank 1 has failed in the optimizer's constructor (DiskError: optimizer state on disk takes" in one["message"], one
    assert list((tmp_path / "state").iterdir()) == []
