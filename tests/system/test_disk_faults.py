"""A disk with optimizer state that fails or is too small, and processes that are killed: nothing is lost unnoticed."""
from __future__ import annotations

import copy
import errno
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine
import numpy as np
import pytest
import tiny_models
import torch
from disk_models import adamw, step, streamed, trained
from killed import kill_at_random_moments
from processes import Process, fresh_process
from resumable import Run, Streamed, load
from tiny_models import assert_torn, cut_power, same_bits, state_of

import megacompile
from megacompile import CheckpointWriter, latest_checkpoint, save_checkpoint
from megacompile.errors import CheckpointError, DiskError, LaneError, TornError
from megacompile.system.direct_file import DirectFile

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.fixture(scope="module")
def in_memory() -> Streamed:
    return Streamed()


@pytest.fixture(scope="module")
def on_disk(drive: Path) -> Streamed:
    return Streamed(disk=drive, disk_state=("layers.0", "layers.2", "epilogue"))


def lion(model: Any) -> Any:
    return megacompile.Lion(model.parameters(), lr=1e-3)


def failing(monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> list[int]:
    """From now on the `number`-th of these calls to the system fails. The other calls of the same tile succeed, so that a write
    leaves a part of its moments on the disk."""
    made: list[int] = []
    real = getattr(os, call)

    def called(file: int, views: list[memoryview], offset: int) -> int:
        made.append(offset)
        if len(made) == number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return int(real(file, views, offset))

    monkeypatch.setattr(os, call, called)
    return made


@pytest.mark.sample(9)
@pytest.mark.parametrize("whole", [False, True], ids=["loop", "train_step"])
@pytest.mark.parametrize(("call", "doing"), [("preadv", "reading"), ("pwritev", "writing")])
@pytest.mark.parametrize("number", [1, 2, 4, 7, 9])
def test_an_error_of_the_disk_in_the_middle_of_a_step_loses_nothing(
        call: str, doing: str, number: int, whole: bool, without_disk: tiny_models.Shared, all_on_disk: tiny_models.Shared,
        drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 errors in each precision: the step is completed, bit for bit, and the model says so if it must be."""
    expected = trained(without_disk, whole, steps=4)
    model = all_on_disk.fresh()
    optimizer = adamw(model)
    for seed in range(2):
        step(model, optimizer, seed, whole)
    model.megacompile.synchronize()
    with monkeypatch.context() as patched:
        made = failing(patched, call, number)
        step(model, optimizer, 2, whole)
        with pytest.raises(DiskError, match=rf"{doing} the optimizer state of \S+ (from|to) {drive} failed \(Input/output "
                                            r"error\): check the drive and call optimizer.step\(\) again, which completes"):
            model.megacompile.synchronize()
        assert len(made) >= number
    torn = engine.torn(model)
    assert torn or call == "preadv", "weights are updated before their moments are written"
    if torn:
        with pytest.raises(TornError, match="an update stopped half-way"):
            model.state_dict()
        with pytest.raises(TornError, match=r"call optimizer.step\(\) again"):
            optimizer.state_dict()
    optimizer.step()
    step(model, optimizer, 3, whole)
    assert same_bits(state_of(model, optimizer), expected)


@pytest.fixture(scope="module", params=[1, 3])
def deferring(without_disk: tiny_models.Shared, drive: Path, request: pytest.FixtureRequest) -> Iterator[tiny_models.Shared]:
    """Moments of all tiles are on disk, and updated after all weights."""
    made = streamed(without_disk.plain.dtype == torch.bfloat16, drive, deferred_moments=True, state_slabs=request.param)
    yield made
    made.close()


@pytest.mark.sample(3)
@pytest.mark.parametrize("make", [adamw, lion], ids=["adamw", "lion"])
@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_an_error_of_the_disk_between_weights_and_their_moments_loses_nothing(
        call: str, make: Callable[..., Any], without_disk: tiny_models.Shared, deferring: tiny_models.Shared,
        monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    """At calls all over the update: in the first reads, the second ones, and the writes. Lion's moments are not updated after
    its weights, so they are written with them. Each kind of run takes other calls out of a dozen; on demand it takes all."""
    expected = trained(without_disk, True, make, steps=3)
    model = deferring.fresh()
    optimizer = make(model)
    step(model, optimizer, 0, whole=True)
    model.megacompile.synchronize()
    with monkeypatch.context() as patched:
        made = failing(patched, call, -1)
        step(model, optimizer, 1, whole=True)
        model.megacompile.synchronize()
    calls = len(made)
    assert calls > 10
    kinds = call == "preadv", make is lion, without_disk.plain.dtype == torch.bfloat16, model.megacompile.plan.state_slabs > 1
    some = range(1 + sum(kinds) % 4, calls + 1, max(4, calls // 3))
    for number in range(1, calls + 1, max(1, calls // 9)) if pytestconfig.getoption("--nightly") else some:
        model = deferring.fresh()
        optimizer = make(model)
        step(model, optimizer, 0, whole=True)
        model.megacompile.synchronize()
        with monkeypatch.context() as patched:
            failing(patched, call, number)
            step(model, optimizer, 1, whole=True)
            with pytest.raises(DiskError, match="completes the step"):
                model.megacompile.synchronize()
        if engine.torn(model):
            with pytest.raises(TornError, match="an update stopped half-way"):
                model.state_dict()
        optimizer.step()
        step(model, optimizer, 2, whole=True)
        assert same_bits(state_of(model, optimizer), expected), number


def test_a_disk_that_goes_on_failing_leaves_the_model_torn_until_a_checkpoint_is_loaded(
        on_disk: Streamed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    run = Run(on_disk.fresh())
    run.steps(2)
    path = save_checkpoint(tmp_path, run.model, run.optimizer, scheduler=run.scheduler)
    expected = run.steps(1), run.masters(), run.moments()
    load(path, run)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", lambda *given: (_ for _ in ()).throw(OSError(errno.EIO, os.strerror(errno.EIO))))
        run.steps(1)
        for _ in range(2):
            with pytest.raises(DiskError, match="writing the optimizer state of"):
                run.model.megacompile.synchronize()
            with pytest.raises(TornError):
                save_checkpoint(tmp_path, run.model, run.optimizer, scheduler=run.scheduler)
            run.optimizer.step()
        with pytest.raises(DiskError):
            run.model.megacompile.synchronize()
    assert latest_checkpoint(tmp_path) == path, "it is whole, and no other was written"
    load(path, run)
    assert run.steps(1) == expected[0]
    assert same_bits(run.masters(), expected[1]) and same_bits(run.moments(), expected[2])


def test_an_error_of_the_disk_with_updates_on_arrival_is_repaired_by_a_checkpoint(
        on_disk: Streamed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    run = Run(on_disk.fresh(), "backward")
    run.steps(2)
    path = save_checkpoint(tmp_path, run.model, run.optimizer, scheduler=run.scheduler)
    expected = run.steps(1), run.masters(), run.moments()
    load(path, run)
    with monkeypatch.context() as patched:
        failing(patched, "pwritev", 1)
        with pytest.raises(DiskError, match="or load a checkpoint"):
            settled(run)
    with pytest.raises(TornError, match="load a checkpoint"):
        run.model.state_dict()
    load(path, run)
    assert run.steps(1) == expected[0]
    assert same_bits(run.masters(), expected[1]) and same_bits(run.moments(), expected[2])


def broken(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """From now on all calls of this kind to the system fail."""
    monkeypatch.setattr(os, call, lambda *given: (_ for _ in ()).throw(OSError(errno.EIO, os.strerror(errno.EIO))))


def test_an_error_of_the_disk_while_a_state_is_read_or_written_is_raised_and_nothing_is_lost(
        on_disk: Streamed, drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    run = Run(on_disk.fresh())
    run.steps(2)
    run.model.megacompile.synchronize()
    weight = run.model.layers[0][1].weight
    with monkeypatch.context() as patched:
        broken(patched, "preadv")
        for read in (run.optimizer.state_dict, lambda: run.optimizer.state[weight]["exp_avg"]):
            with pytest.raises(DiskError, match=rf"reading the optimizer state of \S+ from {drive} failed \(Input/output "
                                                r"error\): check the drive and try again, or load a checkpoint"):
                read()
    expected = run.moments()  # the drive works again
    moment = run.optimizer.state[weight]["exp_avg"]
    moment.mul_(2)
    with monkeypatch.context() as patched:
        broken(patched, "pwritev")
        with pytest.raises(DiskError, match=r"writing the optimizer state of layers\.0 to"):
            run.steps(1)
    run.optimizer.state_dict()
    assert torch.equal(run.optimizer.state[weight]["exp_avg"], 2 * expected["layers.0.1.weight exp_avg"])
    run.optimizer.zero_grad()
    run.steps(1)


Values = dict[str, torch.Tensor]


def saved_run(shared: Streamed, folder: Path, seed: int) -> tuple[Run, Path, tuple[Values, Values]]:
    """A run that has gone on for a step since a checkpoint of its second step; the checkpoint; and the masters and moments in
    it."""
    torch.manual_seed(seed)
    run = Run(shared.fresh())
    run.steps(2)
    path = save_checkpoint(folder, run.model, run.optimizer, scheduler=run.scheduler)
    saved = run.masters(), run.moments()
    run.steps(1)
    run.model.megacompile.synchronize()
    return run, path, saved


def assert_as_saved(run: Run, saved: tuple[Values, Values]) -> None:
    assert same_bits(run.masters(), saved[0]) and same_bits(run.moments(), saved[1])


def test_an_error_of_the_disk_while_a_checkpoint_is_written_costs_that_save_alone(
        on_disk: Streamed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(6)
    run = Run(on_disk.fresh())
    run.steps(2)
    path = save_checkpoint(tmp_path, run.model, run.optimizer, scheduler=run.scheduler)
    writer = CheckpointWriter(tmp_path, run.model, run.optimizer, scheduler=run.scheduler)
    with monkeypatch.context() as patched:
        broken(patched, "preadv")
        writer.save()
        with pytest.raises(CheckpointError, match=r"no checkpoint was saved in \S+ \(DiskError: reading the optimizer state of "
                                                  r"\S+ from \S+ failed \(Input/output error\)"):
            writer.wait()
    assert latest_checkpoint(tmp_path) == path
    run.steps(2)
    expected = run.masters(), run.moments()
    path = save_checkpoint(tmp_path, run.model, run.optimizer, scheduler=run.scheduler)
    run.steps(1)
    load(path, run)
    assert_as_saved(run, expected)


def test_an_error_of_the_disk_in_the_middle_of_a_load_leaves_the_model_torn_until_a_load_succeeds(
        on_disk: Streamed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, path, expected = saved_run(on_disk, tmp_path, seed=7)
    with monkeypatch.context() as patched:
        failing(patched, "pwritev", 3)
        with pytest.raises(DiskError, match="writing the optimizer state of"):
            load(path, run)
    for use in (run.optimizer.state_dict, lambda: run.steps(1), run.model.state_dict):
        with pytest.raises(TornError, match="a load stopped half-way: load a checkpoint"):
            use()
    load(path, run)
    assert_as_saved(run, expected)


def test_an_error_of_the_drive_with_checkpoints_in_the_middle_of_a_load_leaves_the_model_torn_until_a_load_succeeds(
        in_memory: Streamed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are not mapped either. They are read once for their checksums, and then again."""
    run, path, expected = saved_run(in_memory, tmp_path, seed=8)
    with monkeypatch.context() as patched:
        failing(patched, "preadv", 5)
        with pytest.raises(CheckpointError, match=r"tensors-\d+.safetensors cannot be read \(Input/output error\)"):
            load(path, run)
    with pytest.raises(TornError, match="a load stopped half-way"):
        run.steps(1)
    load(path, run)
    assert_as_saved(run, expected)


@pytest.mark.parametrize("stopped", ["weights", "state"])
def test_a_load_of_weights_repairs_no_state_that_is_half_loaded_and_a_load_of_state_no_weights(
        stopped: str, in_memory: Streamed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, path, _ = saved_run(in_memory, tmp_path, seed=9)
    weights, state = {n: t.clone() for n, t in run.model.state_dict().items()}, copy.deepcopy(run.optimizer.state_dict())
    loads = {"weights": lambda: run.model.load_state_dict(weights), "state": lambda: run.optimizer.load_state_dict(state)}
    with monkeypatch.context() as patched:
        if stopped == "state":
            patched.setattr(run.optimizer, "put_state", stopped_by_the_user)
        else:
            failing(patched, "preadv", 5)
        with pytest.raises((KeyboardInterrupt, CheckpointError)):
            load(path, run)
    loads["weights" if stopped == "state" else "state"]()
    with pytest.raises(TornError, match="a load stopped half-way"):
        run.steps(1)
    loads[stopped]()
    if stopped == "weights":
        loads["state"]()  # the remainders of the weights are in the optimizer's state
    run.steps(1)


def stopped_by_the_user(*_: object) -> None:
    raise KeyboardInterrupt


def settled(run: Run) -> None:
    """A step, and the end of its update."""
    run.steps(1)
    run.model.megacompile.synchronize()


@pytest.mark.sample(5)
@pytest.mark.parametrize("op", ["read_state", "update", "write_state"])
@pytest.mark.parametrize("number", [1, 2])
def test_an_update_that_stops_at_an_op_of_the_disk_is_completed(
        op: str, number: int, without_disk: tiny_models.Shared, some_on_disk: tiny_models.Shared) -> None:
    expected = trained(without_disk, True, steps=3)
    model = some_on_disk.fresh()
    optimizer = adamw(model)
    step(model, optimizer, 0, whole=True)
    model.megacompile.synchronize()
    cut_power(model, op, number)
    step(model, optimizer, 1, whole=True)
    if op == "read_state" or (op, number) == ("update", 1):  # no update has begun
        with pytest.raises(LaneError, match="power cut"):
            model.megacompile.synchronize()
    else:
        assert_torn(model)
    optimizer.step()
    step(model, optimizer, 2, whole=True)
    assert same_bits(state_of(model, optimizer), expected)


def test_too_little_space_is_refused_before_anything_changes(
        without_disk: tiny_models.Shared, drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = streamed(without_disk.plain.dtype == torch.bfloat16, drive)
    expected = trained(without_disk, True, steps=3)
    model = ours.fresh()
    optimizer = adamw(model)
    step(model, optimizer, 0, whole=True)
    with monkeypatch.context() as patched:
        patched.setattr(DirectFile, "_allocate", lambda self: (_ for _ in ()).throw(DiskError("no space")))
        with pytest.raises(DiskError, match="no space"):
            adamw(model, state_dtype="8bit")
    for seed in (1, 2):
        step(model, optimizer, seed, whole=True)
    assert same_bits(state_of(model, optimizer), expected)
    ours.close()


def test_no_complete_checkpoint_is_lost_when_training_with_a_disk_is_killed(
        tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """In a process that has run nothing else, since it forks. With --kill-moments 40 it is killed so often."""
    (tmp_path / "disk").mkdir()
    with fresh_process() as fresh:
        fresh.submit(kill_at_random_moments, tmp_path / "checkpoints", int(pytestconfig.getoption("--kill-moments")),
                     tmp_path / "disk").result()


def test_a_resume_after_a_kill_has_the_bits_of_a_run_that_was_never_killed(tmp_path: Path) -> None:
    """Another process trains with a disk, saves each step and is killed; this one goes on from its last checkpoint."""
    ours = Streamed(disk=tmp_path / "disk", disk_state="all")
    model = ours.fresh()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(7)
    whole = Run(model)
    masters = []
    for _ in range(12):
        whole.steps(1)
        masters.append((whole.masters(), whole.moments()))
    (tmp_path / "victim.py").write_text(VICTIM)
    victim = Process(tmp_path / "victim.py", [str(tmp_path)], os.environ, tmp_path / "printed")
    while not (tmp_path / "printed").exists() or "3\n" not in (tmp_path / "printed").read_text():
        assert victim.poll() is None, (tmp_path / "printed").read_text()
        time.sleep(0.01)
    time.sleep(0.05)
    victim.kill()
    victim.wait()
    assert list((tmp_path / "disk").iterdir()) == [], "its file went with it"
    run = Run(ours.fresh())
    done = load(tmp_path / "checkpoints", run)
    assert 3 <= done < 12
    run.steps(12 - done)
    assert same_bits(run.masters(), masters[-1][0]) and same_bits(run.moments(), masters[-1][1])


VICTIM = """
import random
import sys
from pathlib import Path
folder = Path(sys.argv[1])
import numpy as np
import torch
from megacompile import CheckpointWriter
from resumable import Run, Streamed
model = Streamed(disk=folder / "disk", disk_state="all").fresh()
for seed in (torch.manual_seed, random.seed, np.random.seed):
    seed(7)
run = Run(model)
with CheckpointWriter(folder / "checkpoints", model, run.optimizer, scheduler=run.scheduler, keep=2) as writer:
    for step in range(1, 12):
        run.steps(1)
        writer.save(extra=step)
        writer.wait()
        print(step, flush=True)
    import time
    time.sleep(60)
"""
