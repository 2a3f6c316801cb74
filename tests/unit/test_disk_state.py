"""Moments on disk: the bits of the same run in memory, with any lane timing; failures lose nothing unnoticed."""
from __future__ import annotations

import dataclasses
import errno
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from killed import kill_at_random_moments
from resumable import Run, Streamed, load
from tiny_models import assert_torn, batch, cut_power, same_bits, state_of
from torch import Tensor

import megacompile
from megacompile import CheckpointWriter, latest_checkpoint, save_checkpoint
from megacompile.errors import DiskError, InsufficientMemoryError, LaneError, MegacompileError, TornError, UnsupportedError
from megacompile.ir.plan import STATE_SLABS
from megacompile.ir.program import Lane, argument, find
from megacompile.planning import disk_tiles
from megacompile.planning.config import StreamConfig
from megacompile.planning.disk_tiles import with_disk
from megacompile.predict.hardware import DISK, Hardware
from megacompile.system import direct_file
from megacompile.system.direct_file import BLOCK, DirectFile
from megacompile.tools.calibrate_disk import with_disk_rates

ROWS = 6
TILES = ("prologue", "model.layers.0", "model.layers.1", "model.layers.2", "epilogue")
#: Two of three layers on disk, between tiles in memory.
SOME = ("model.layers.0", "model.layers.2")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The moments of a tile are read and written by several calls at a time."""
    monkeypatch.setattr(direct_file, "CHUNK", BLOCK)


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def shared(request: pytest.FixtureRequest) -> Iterator[tiny_models.Shared]:
    made = tiny_models.Shared(bf16=request.param == "bf16", micro_batch_size=2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nvme") / "state"


def streamed(bf16: bool, folder: Path, **options: Any) -> tiny_models.Shared:
    return tiny_models.Shared(bf16=bf16, micro_batch_size=2, disk=folder, **{"disk_state": "all", **options})


@pytest.fixture(scope="module")
def all_on_disk(shared: tiny_models.Shared, folder: Path) -> Iterator[tiny_models.Shared]:
    made = streamed(shared.plain.dtype == torch.bfloat16, folder)
    yield made
    made.close()


@pytest.fixture(scope="module")
def some_on_disk(shared: tiny_models.Shared, folder: Path) -> Iterator[tiny_models.Shared]:
    made = streamed(shared.plain.dtype == torch.bfloat16, folder, disk_state=SOME, state_slabs=1, resident=("model.layers.2",))
    yield made
    made.close()


def step(model: Any, optimizer: Any, seed: int, whole: bool) -> None:
    if whole:
        model.megacompile.train_step(batch(seed, rows=ROWS), optimizer)
        return
    model(**batch(seed, rows=ROWS)).loss.backward()
    if seed == 2 and optimizer.overlap is None:
        model(**batch(seed + 100, rows=ROWS)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def adamw(model: Any, **options: Any) -> Any:
    return megacompile.AdamW(model.parameters(), **{"lr": 1e-2, "eps": 1e-4, "max_grad_norm": 1.0, **options})


def trained(shared: tiny_models.Shared, whole: bool, make: Callable[..., Any] = adamw, steps: int = 10,
            **options: Any) -> dict[str, Tensor]:
    """Weights and optimizer state after some steps."""
    model = shared.fresh()
    optimizer = make(model, **options)
    for seed in range(steps):
        step(model, optimizer, seed, whole)
    return state_of(model, optimizer)


def update_of(model: Any) -> dict[str, set[str]]:
    """The tiles of each op of an update."""
    program = model.megacompile.streamed.step.trained.program
    graph = program.section("update" if "update" in program.sections else "train_step")
    return {op: {argument(node, "tile") for node in find(graph, op)}
            for op in ("read_state", "adam_from_disk", "write_state", "adam")}


# ---- bits ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("whole", [False, True], ids=["loop", "train_step"])
@pytest.mark.parametrize("options", [
    {}, {"state_dtype": "bfloat16"}, {"state_dtype": "8bit"}, {"state_dtype": "8bit", "max_grad_norm": None},
    {"overlap": "backward", "max_grad_norm": None}], ids=str)
def test_ten_steps_have_the_bits_of_ten_steps_in_memory(
        options: dict[str, Any], whole: bool, shared: tiny_models.Shared, all_on_disk: tiny_models.Shared,
        some_on_disk: tiny_models.Shared) -> None:
    expected = trained(shared, whole, **options)
    assert same_bits(trained(all_on_disk, whole, **options), expected)
    assert same_bits(trained(some_on_disk, whole, **options), expected)
    if "overlap" not in options:
        ops = update_of(some_on_disk.model)
        assert ops["read_state"] == ops["adam_from_disk"] == ops["write_state"] == {*SOME}
        assert ops["adam"] == {*TILES} - {*SOME}


@pytest.mark.parametrize("make", [
    lambda model: megacompile.Lion(model.parameters(), lr=1e-3),
    lambda model: megacompile.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1),
    lambda model: megacompile.AdamW(model.parameters(), lr=1e-2, master="bfloat16", state_dtype="bfloat16")],
    ids=["lion", "sgd", "bf16 masters"])
def test_other_rules_and_masters_have_the_bits_of_memory_too(make: Callable[..., Any], folder: Path) -> None:
    ours, theirs = streamed(True, folder), tiny_models.Shared(bf16=True, micro_batch_size=2)
    assert same_bits(trained(ours, True, make, steps=4), trained(theirs, True, make, steps=4))
    assert update_of(ours.model)["write_state"] == {*TILES}
    ours.close()
    theirs.close()


@pytest.mark.parametrize("straggler", [Lane.DISK_READ, Lane.DISK_WRITE, Lane.CPU, Lane.D2H])
def test_late_lanes_change_no_bit(
        straggler: Lane, shared: tiny_models.Shared, some_on_disk: tiny_models.Shared) -> None:
    draw = random.Random(str(straggler))

    def delay(lane: Lane) -> None:
        if draw.random() < (0.3 if lane == straggler else 0.02):
            time.sleep(draw.random() * 2e-3)

    expected = trained(shared, False, steps=4)
    model = some_on_disk.fresh()
    optimizer = adamw(model)
    model.megacompile.streamed.executor.delay = delay
    for seed in range(4):
        step(model, optimizer, seed, whole=False)
    assert same_bits(state_of(model, optimizer), expected)


def test_a_parameter_without_a_gradient_is_neither_read_nor_written(some_on_disk: tiny_models.Shared) -> None:
    model = some_on_disk.fresh()
    optimizer = megacompile.AdamW([p for name, p in model.named_parameters() if "layers.0" in name])
    before = model.megacompile.stats
    step(model, optimizer, 0, whole=False)
    model.megacompile.synchronize()
    after, tile = model.megacompile.stats, model.megacompile.streamed.tiling.layouts["model.layers.0"]
    for name in ("disk_bytes_read", "disk_bytes_written"):
        assert after[name] - before[name] == tile.disk_bytes


def test_gradients_that_are_not_finite_write_nothing(some_on_disk: tiny_models.Shared) -> None:
    model = some_on_disk.fresh()
    optimizer = adamw(model, non_finite="skip")
    step(model, optimizer, 0, whole=False)
    expected, written = state_of(model, optimizer), model.megacompile.stats["disk_bytes_written"]
    model(**batch(1, rows=ROWS)).loss.backward()
    model.model.layers[0].mlp.up_proj.weight.grad[0, 0] = float("nan")
    optimizer.step()
    optimizer.zero_grad()
    assert same_bits(state_of(model, optimizer), expected)
    assert model.megacompile.stats["disk_bytes_written"] == written


# ---- what users see --------------------------------------------------------------------------------------------------

def test_stats_count_what_is_written_and_memory_without_what_is_on_disk(
        shared: tiny_models.Shared, all_on_disk: tiny_models.Shared, folder: Path) -> None:
    trained(shared, True, steps=3)
    before = all_on_disk.model.megacompile.stats
    trained(all_on_disk, True, steps=3)
    ours, theirs = all_on_disk.model.megacompile.stats, shared.model.megacompile.stats
    layouts = all_on_disk.model.megacompile.streamed.tiling.layouts.values()
    once = sum(layout.disk_bytes for layout in layouts)
    assert ours["disk_bytes"] >= once > 0 and "moments" not in ours["host_parts"]
    for name in ("disk_bytes_read", "disk_bytes_written"):
        assert ours[name] - before[name] == 3 * once and theirs[name] == 0
    assert theirs["host_parts"]["moments"] == sum(sum(layout.moment_bytes) for layout in layouts)
    assert list(folder.iterdir()) == [], "the file has no name"


def test_states_are_read_written_and_restarted_as_in_memory(
        shared: tiny_models.Shared, some_on_disk: tiny_models.Shared) -> None:
    def run(shared: tiny_models.Shared) -> dict[str, Tensor]:
        model = shared.fresh()
        optimizer = adamw(model)
        step(model, optimizer, 0, whole=True)
        on_disk, other = (model.model.layers[layer].mlp.up_proj.weight for layer in (0, 1))
        for parameter in (on_disk, other):
            optimizer.state[parameter]["exp_avg"] = 2 * optimizer.state[parameter]["exp_avg"]
        step(model, optimizer, 1, whole=True)
        optimizer.state[on_disk]["exp_avg_sq"].mul_(0.5)
        optimizer.state.pop(model.model.layers[2].mlp.up_proj.weight)
        step(model, optimizer, 2, whole=False)
        kept = {index: {name: torch.as_tensor(value).clone() for name, value in state.items()}
                for index, state in optimizer.state_dict()["state"].items()}
        groups = optimizer.state_dict()["param_groups"]
        step(model, optimizer, 3, whole=False)
        again = adamw(model, lr=5e-3)
        again.load_state_dict({"state": kept, "param_groups": groups})
        step(model, again, 4, whole=True)
        return state_of(model, again)

    assert same_bits(run(some_on_disk), run(shared))


def test_another_format_gets_another_file_and_the_first_is_gone(shared: tiny_models.Shared, folder: Path) -> None:
    ours = streamed(shared.plain.dtype == torch.bfloat16, folder)
    expected = trained(shared, True, steps=3, state_dtype="8bit")
    trained(ours, True, steps=2)
    files = ours.model.megacompile.streamed.store.files
    wide = ours.model.megacompile.stats["disk_bytes"]
    assert same_bits(trained(ours, True, steps=3, state_dtype="8bit"), expected)
    assert [file.file.closed for file in files] == [True, False]
    assert 0 < ours.model.megacompile.stats["disk_bytes"] < wide
    trained(ours, True, steps=1, state_dtype="8bit")
    assert len(files) == 2, "the same state stays where it is"
    ours.close()


def test_a_closed_model_leaves_its_state_readable_and_no_open_file(shared: tiny_models.Shared, folder: Path) -> None:
    ours = streamed(shared.plain.dtype == torch.bfloat16, folder)
    expected = trained(shared, True, steps=2)
    model = ours.fresh()
    optimizer = adamw(model)
    for seed in range(2):
        step(model, optimizer, seed, whole=True)
    (file,) = model.megacompile.streamed.store.files
    ours.close()
    assert file.file.closed and file.bytes == 0
    assert same_bits(state_of(model, optimizer), expected)


# ---- checkpoints -----------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def in_memory() -> Streamed:
    return Streamed()


@pytest.fixture(scope="module")
def on_disk(folder: Path) -> Streamed:
    return Streamed(disk=folder, disk_state=("layers.0", "layers.2", "epilogue"))


@pytest.mark.parametrize(("saved", "resumed"), [("on_disk", "on_disk"), ("on_disk", "in_memory"), ("in_memory", "on_disk")])
@pytest.mark.parametrize("whole", [False, True], ids=["loop", "train_step"])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_ten_steps_are_five_a_resume_and_five_on_disk_or_not(
        saved: str, resumed: str, whole: bool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    torch.manual_seed(1)
    run = Run(request.getfixturevalue(saved).fresh(), None, whole)
    with CheckpointWriter(tmp_path, run.model, run.optimizer, scheduler=run.scheduler) as writer:
        run.steps(5)
        writer.save(extra=5)
        expected = run.steps(5), run.masters(), run.moments()
    again = Run(request.getfixturevalue(resumed).fresh(), None, whole)
    again.steps(2)
    assert load(tmp_path, again) == 5
    assert again.steps(5) == expected[0]
    assert same_bits(again.masters(), expected[1]) and same_bits(again.moments(), expected[2])


def test_a_save_has_the_state_of_its_moment_while_updates_write_the_disk(on_disk: Streamed, tmp_path: Path,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow writer: updates copy the tiles that it has not read, or wait for it."""
    from megacompile.runtime.memory.snapshot import Snapshot

    read = Snapshot.read
    monkeypatch.setattr(Snapshot, "read", lambda *given: (time.sleep(2e-3), read(*given))[1])
    torch.manual_seed(2)
    run = Run(on_disk.fresh())
    run.steps(2)
    expected = run.masters(), run.moments()
    with CheckpointWriter(tmp_path, run.model, run.optimizer, scheduler=run.scheduler) as writer:
        writer.save()
        run.steps(3)
    load(tmp_path, run)
    assert same_bits(run.masters(), expected[0]) and same_bits(run.moments(), expected[1])


# ---- failures --------------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("whole", [False, True], ids=["loop", "train_step"])
@pytest.mark.parametrize(("call", "doing"), [("preadv", "reading"), ("pwritev", "writing")])
@pytest.mark.parametrize("number", [1, 2, 4, 7, 9])
def test_an_error_of_the_disk_in_the_middle_of_a_step_loses_nothing(
        call: str, doing: str, number: int, whole: bool, shared: tiny_models.Shared, all_on_disk: tiny_models.Shared,
        folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 errors in each precision: the step is completed, bit for bit, and the model says so if it must be."""
    expected = trained(shared, whole, steps=4)
    model = all_on_disk.fresh()
    optimizer = adamw(model)
    for seed in range(2):
        step(model, optimizer, seed, whole)
    model.megacompile.synchronize()
    with monkeypatch.context() as patched:
        made = failing(patched, call, number)
        step(model, optimizer, 2, whole)
        with pytest.raises(DiskError, match=rf"{doing} the optimizer state of \S+ (from|to) {folder} failed \(Input/output "
                                            r"error\): see to the drive and call optimizer.step\(\) again, which completes"):
            model.megacompile.synchronize()
        assert len(made) >= number
    torn = model.megacompile.streamed.step.torn
    assert torn or call == "preadv", "weights are updated before their moments are written"
    if torn:
        with pytest.raises(TornError, match="an update stopped half-way"):
            model.state_dict()
        with pytest.raises(TornError, match=r"call optimizer.step\(\) again"):
            optimizer.state_dict()
    optimizer.step()
    step(model, optimizer, 3, whole)
    assert same_bits(state_of(model, optimizer), expected)


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


def settled(run: Run) -> None:
    """A step, and the end of its update."""
    run.steps(1)
    run.model.megacompile.synchronize()


@pytest.mark.parametrize("op", ["read_state", "adam_from_disk", "write_state"])
@pytest.mark.parametrize("number", [1, 2])
def test_an_update_that_stops_at_an_op_of_the_disk_is_completed(
        op: str, number: int, shared: tiny_models.Shared, some_on_disk: tiny_models.Shared) -> None:
    expected = trained(shared, True, steps=3)
    model = some_on_disk.fresh()
    optimizer = adamw(model)
    step(model, optimizer, 0, whole=True)
    model.megacompile.synchronize()
    cut_power(model, op, number)
    step(model, optimizer, 1, whole=True)
    if op == "read_state":  # it may run before the first update
        with pytest.raises(LaneError, match="power cut"):
            model.megacompile.synchronize()
    else:
        assert_torn(model)
    optimizer.step()
    step(model, optimizer, 2, whole=True)
    assert same_bits(state_of(model, optimizer), expected)


def test_too_little_space_is_refused_before_anything_changes(
        shared: tiny_models.Shared, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = streamed(shared.plain.dtype == torch.bfloat16, folder)
    expected = trained(shared, True, steps=3)
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
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
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
    with subprocess.Popen([sys.executable, "-c", VICTIM, str(Path(__file__).parent), str(tmp_path)], stdout=subprocess.PIPE,
                          text=True) as victim:
        assert victim.stdout is not None
        for line in victim.stdout:
            if int(line) == 3:
                break
        time.sleep(0.05)
        victim.kill()
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
tests, folder = map(Path, sys.argv[1:])
sys.path[:0] = [str(tests), str(tests.parent)]
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


# ---- which tiles -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("options", "message"), [
    ({"disk": 3}, "disk must be the path of a folder on a local drive, not 3"),
    ({"disk": ""}, "disk must be the path of a folder on a local drive, not ''"),
    ({"disk_state": "all"}, r"disk_state names tiles whose moments are on disk, and there is none: give a folder \(disk\)"),
    ({"disk": "state", "disk_state": ("a",), "visiting_state": ("a",)}, "visiting_state and disk_state both name a"),
    ({"disk": "state", "state_slabs": 0}, "state_slabs")])
def test_options_that_say_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MegacompileError, match=message):
        StreamConfig.of(**options)


def test_tiles_that_cannot_be_on_disk_are_refused_with_the_reason(folder: Path) -> None:
    with pytest.raises(MegacompileError, match=r"disk_state names model.layers.9, which are not tiles of"):
        streamed(False, folder, disk_state=("model.layers.9",))
    frozen = tiny_models.build()
    frozen.model.layers[1].requires_grad_(False)
    with pytest.raises(MegacompileError, match=r"disk_state names model.layers.1, whose moments cannot be on disk \(it is "
                                               r"frozen\): leave it out; prologue, model.layers.0"):
        megacompile.stream(frozen, device="cpu", disk=folder, disk_state=("model.layers.1",))
    ours = streamed(True, folder, disk_state=("model.layers.1",))
    with pytest.raises(MegacompileError, match=r"cannot be on disk \(whole matrices are updated on the device\)"):
        megacompile.Muon(ours.fresh().parameters())
    ours.close()


def test_several_processes_are_refused(folder: Path) -> None:
    with pytest.raises(UnsupportedError, match="disk holds the optimizer state of one process, and 2 train this model"):
        megacompile.schedule(tiny_models.build(), batch=2, length=8, device="cpu", gpus=2, disk=folder)


def tiling_of(**options: Any) -> Any:
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=8)
    return megacompile.schedule(tiny_models.build(bf16=True, **sizes), batch=2, length=8, device="cpu", **options).tiling


def test_the_fewest_tiles_are_on_disk_that_let_training_fit_spread_over_the_layers(folder: Path) -> None:
    tiling = tiling_of()
    config = StreamConfig.of(disk=folder)
    needed = disk_tiles.host_bytes(tiling, on_arrival=False)
    assert with_disk(tiling, config, needed, on_arrival=False).on_disk == ()
    before = 0
    for room in range(needed - 1, needed - sum(layout.disk_bytes for layout in tiling.layouts.values()), -20_000):
        found = with_disk(tiling, config, room, on_arrival=False)
        count = len(found.on_disk)
        if disk_tiles.host_bytes(found, on_arrival=False) > room:
            assert count == len(tiling.layouts), "all that can be"
            break
        if disk_tiles.host_bytes(found, False, STATE_SLABS) > room:
            continue  # with one slab, fewer tiles may do
        layers = [int(tile.rpartition(".")[2]) for tile in found.on_disk if "layers" in tile]
        gaps = [after - first for first, after in pairwise(layers)]
        assert max(gaps, default=1) <= min(gaps, default=1) + 1, f"evenly spread: {layers}"
        assert count >= before and (len(layers) == 8 or count == len(layers)), "boundary tiles last"
        before = count
    assert before > 2


def test_tiles_whose_moments_are_somewhere_stay_there(folder: Path) -> None:
    tiling, config = tiling_of(), StreamConfig.of(disk=folder)
    room = disk_tiles.host_bytes(tiling, on_arrival=False) - 100_000
    there, in_memory = {"model.layers.5"}, {"model.layers.0", "model.layers.3"}
    found = with_disk(tiling, config, room, False, there=there, in_memory=in_memory)
    assert there < set(found.on_disk) and not in_memory & set(found.on_disk)
    assert disk_tiles.host_bytes(found, on_arrival=False) <= room


def test_training_that_does_not_fit_host_memory_fits_with_a_disk(folder: Path, shared: tiny_models.Shared) -> None:
    bf16 = shared.plain.dtype == torch.bfloat16
    tiling = shared.model.megacompile.streamed.tiling
    there = disk_tiles.host_bytes(tiling, on_arrival=False) - 20_000
    ours = tiny_models.Shared(bf16=bf16, micro_batch_size=2, host_memory=there)
    with pytest.raises(InsufficientMemoryError, match="training with this optimizer takes"):
        adamw(ours.model)
    ours.close()
    expected = trained(shared, True, steps=3)
    ours = tiny_models.Shared(bf16=bf16, micro_batch_size=2, host_memory=there, disk=folder)
    assert same_bits(trained(ours, True, steps=3), expected)
    on_disk = ours.model.megacompile.plan.disk_state
    assert 0 < len(on_disk) < len(TILES) and update_of(ours.model)["write_state"] == {*on_disk}
    ours.close()


# ---- predictions -----------------------------------------------------------------------------------------------------

def planned(read: float, write: float, **options: Any) -> Any:
    """For an H200 with such a disk, and a model whose update takes long beside its forward."""
    hardware = dataclasses.replace(Hardware.find("h200"), disk={"read": read, "write": write})
    model = tiny_models.build(bf16=True, hidden_size=64, intermediate_size=128, num_hidden_layers=8)
    return megacompile.schedule(model, batch=2, length=64, whole_step=True, hardware=hardware, disk="/nvme/state",
                                **{"disk_state": "all", **options})


def test_a_step_takes_as_long_as_the_disk_needs() -> None:
    """Reading and writing beside each other: the slower of both binds, and the lanes of a simulated step say so."""
    for read, write, binds in ((1e6, 1e9, Lane.DISK_READ), (1e9, 1e6, Lane.DISK_WRITE)):
        found = planned(read, write)
        moved = sum(layout.disk_bytes for layout in found.tiling.layouts.values())
        step = found.simulate()
        assert step.binds == binds
        assert step.busy_s[Lane.DISK_READ] == pytest.approx(moved / read)
        assert step.busy_s[Lane.DISK_WRITE] == pytest.approx(moved / write)
        assert step.step_s == pytest.approx(moved / min(read, write), rel=0.2)


def test_as_few_slabs_are_chosen_as_leave_a_step_as_fast() -> None:
    found = planned(3e7, 2e7)
    simulator = found.planner.simulator
    seconds = {count: simulator.cautious_s(dataclasses.replace(found.plan, state_slabs=count), True) for count in range(1, 9)}
    assert 1 < found.plan.state_slabs < 8
    assert seconds[found.plan.state_slabs] <= 1.003 * min(seconds.values()) < seconds[found.plan.state_slabs - 1]
    assert planned(3e7, 2e7, state_slabs=5).plan.state_slabs == 5
    slabs = {slot for slot in found.program().slots if slot[0] == "M"}
    assert slabs == {"MB0", *(f"M{number}" for number in range(found.plan.state_slabs))}


def test_a_plan_says_what_a_step_writes_and_how_long_a_drive_lasts() -> None:
    found = planned(**DISK, optim="adamw_8bit")
    written = sum(layout.disk_bytes for layout in found.tiling.layouts.values())
    text = found.outlook().text(disk_rating=10**12)
    assert f"disk: the moments of 10 of 10 tiles, {written / 2**10:.2f} KiB, are read and written in each step" in text
    assert f"drives rated for 0.001 PB last {10**12 // written:,} steps" in text
    assert "drives rated" not in found.explain()
    assert "disk:" not in planned(**DISK, disk_state=()).explain()


def test_the_drives_are_measured_as_training_uses_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    found = with_disk_rates(Hardware.find("h200"), tmp_path, 1e-3, said.append)
    assert list(tmp_path.iterdir()) == [] and len(said) == 4
    assert found.disk.keys() == {"read", "write"} and all(rate > 1e5 for rate in found.disk.values())
    assert found.beside["disk_read disk_write"].keys() == {"disk_read", "disk_write"}
    assert all(0 < left <= 1 for left in found.beside["disk_read disk_write"].values())
    path = tmp_path / "rates.json"
    found.save(path)
    assert Hardware.load(path) == found and "disk write" in found.table()
    monkeypatch.setattr(os, "preadv", lambda *given: 0)
    with pytest.raises(DiskError, match=r"the drive of \S+ failed while it was measured \(the file ended\): see to the drive"):
        with_disk_rates(found, tmp_path, 1e-3)
