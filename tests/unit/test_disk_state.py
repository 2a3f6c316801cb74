"""Moments on disk: the bits of the same run in memory, with any lane timing; failures lose nothing unnoticed."""
from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from disk_models import ROWS, SOME, TILES, adamw, step, streamed, trained, update_of
from resumable import Run, Streamed, load
from tiny_models import batch, same_bits, state_of
from torch import Tensor

import megacompile
from megacompile import CheckpointWriter
from megacompile.ir.program import Lane

pytestmark = pytest.mark.usefixtures("small_chunks")

# ---- bits ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("whole", [False, True], ids=["loop", "train_step"])
@pytest.mark.parametrize("options", [
    {}, {"state_dtype": "bfloat16"}, {"state_dtype": "8bit"}, {"state_dtype": "8bit", "max_grad_norm": None},
    {"overlap": "backward", "max_grad_norm": None}], ids=str)
def test_ten_steps_have_the_bits_of_ten_steps_in_memory(
        options: dict[str, Any], whole: bool, without_disk: tiny_models.Shared, all_on_disk: tiny_models.Shared,
        some_on_disk: tiny_models.Shared) -> None:
    expected = trained(without_disk, whole, **options)
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
def test_other_rules_and_masters_have_the_bits_of_memory_too(make: Callable[..., Any], drive: Path) -> None:
    ours, theirs = streamed(True, drive), tiny_models.Shared(bf16=True, micro_batch_size=2)
    assert same_bits(trained(ours, True, make, steps=4), trained(theirs, True, make, steps=4))
    assert update_of(ours.model)["write_state"] == {*TILES}
    ours.close()
    theirs.close()


@pytest.mark.parametrize("straggler", [Lane.DISK_READ, Lane.DISK_WRITE, Lane.CPU, Lane.D2H])
def test_late_lanes_change_no_bit(
        straggler: Lane, without_disk: tiny_models.Shared, some_on_disk: tiny_models.Shared) -> None:
    draw = random.Random(str(straggler))

    def delay(lane: Lane) -> None:
        if draw.random() < (0.3 if lane == straggler else 0.02):
            time.sleep(draw.random() * 2e-3)

    expected = trained(without_disk, False, steps=4)
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
        without_disk: tiny_models.Shared, all_on_disk: tiny_models.Shared, drive: Path) -> None:
    trained(without_disk, True, steps=3)
    before = all_on_disk.model.megacompile.stats
    trained(all_on_disk, True, steps=3)
    ours, theirs = all_on_disk.model.megacompile.stats, without_disk.model.megacompile.stats
    layouts = all_on_disk.model.megacompile.streamed.tiling.layouts.values()
    once = sum(layout.disk_bytes for layout in layouts)
    assert ours["disk_bytes"] >= once > 0 and "moments" not in ours["host_parts"]
    for name in ("disk_bytes_read", "disk_bytes_written"):
        assert ours[name] - before[name] == 3 * once and theirs[name] == 0
    assert theirs["host_parts"]["moments"] == sum(sum(layout.moment_bytes) for layout in layouts)
    assert list(drive.iterdir()) == [], "the file has no name"


def test_states_are_read_written_and_restarted_as_in_memory(
        without_disk: tiny_models.Shared, some_on_disk: tiny_models.Shared) -> None:
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

    assert same_bits(run(some_on_disk), run(without_disk))


def test_another_format_gets_another_file_and_the_first_is_gone(without_disk: tiny_models.Shared, drive: Path) -> None:
    ours = streamed(without_disk.plain.dtype == torch.bfloat16, drive)
    expected = trained(without_disk, True, steps=3, state_dtype="8bit")
    trained(ours, True, steps=2)
    files = ours.model.megacompile.streamed.store.files
    wide = ours.model.megacompile.stats["disk_bytes"]
    assert same_bits(trained(ours, True, steps=3, state_dtype="8bit"), expected)
    assert [file.file.closed for file in files] == [True, False]
    assert 0 < ours.model.megacompile.stats["disk_bytes"] < wide
    trained(ours, True, steps=1, state_dtype="8bit")
    assert len(files) == 2, "the same state stays where it is"
    ours.close()


def test_a_closed_model_leaves_its_state_readable_and_no_open_file(without_disk: tiny_models.Shared, drive: Path) -> None:
    ours = streamed(without_disk.plain.dtype == torch.bfloat16, drive)
    expected = trained(without_disk, True, steps=2)
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
def on_disk(drive: Path) -> Streamed:
    return Streamed(disk=drive, disk_state=("layers.0", "layers.2", "epilogue"))


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
