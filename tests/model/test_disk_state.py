"""Moments on disk: the bits of the same run in memory, with any lane timing; failures lose nothing unnoticed."""
from __future__ import annotations

import gc
import random
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import engine
import pytest
import tiny_models
import torch
from disk_models import ROWS, SOME, TILES, adamw, step, streamed, trained, update_of
from resumable import Run, Streamed, load
from tiny_models import batch, same_bits, state_of
from torch import Tensor

import megacompile
from megacompile import CheckpointWriter
from megacompile.errors import InsufficientMemoryError, MegacompileError
from megacompile.ir.program import Lane
from megacompile.runtime.memory.tiles import HostTile, TileLayout
from megacompile.streaming.optimizer import state
from megacompile.system.host_memory import SharedMemory

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.fixture(scope="module", params=[pytest.param("fp32", marks=pytest.mark.nightly), "bf16"])
def without_disk(request: pytest.FixtureRequest) -> Iterator[tiny_models.Shared]:
    """As everywhere; here bf16 weights, whose masters have more parts, are those of every run."""
    made = tiny_models.Shared(bf16=request.param == "bf16", micro_batch_size=2)
    yield made
    made.close()


# ---- bits ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("options", "whole"), [
    ({"state_dtype": "8bit"}, True), ({"overlap": "backward", "max_grad_norm": None}, False),
    *(pytest.param(*other, marks=pytest.mark.nightly) for other in (
        ({}, False), ({}, True), ({"state_dtype": "bfloat16"}, False), ({"state_dtype": "bfloat16"}, True),
        ({"state_dtype": "8bit", "max_grad_norm": None}, False), ({"state_dtype": "8bit", "max_grad_norm": None}, True),
        ({"state_dtype": "8bit"}, False), ({"overlap": "backward", "max_grad_norm": None}, True)))], ids=str)
def test_ten_steps_have_the_bits_of_ten_steps_in_memory(
        options: dict[str, Any], whole: bool, without_disk: tiny_models.Shared, all_on_disk: tiny_models.Shared,
        some_on_disk: tiny_models.Shared) -> None:
    expected = trained(without_disk, whole, **options)
    assert same_bits(trained(all_on_disk, whole, **options), expected)
    assert same_bits(trained(some_on_disk, whole, **options), expected)
    if "overlap" not in options:
        ops = update_of(some_on_disk.model)
        assert ops["read_state"] == ops["write_state"] == {*SOME} and ops["update"] == {*TILES}


@pytest.mark.sample(2)
@pytest.mark.parametrize("whole", [False, True], ids=["loop", "train_step"])
@pytest.mark.parametrize("options", [{}, {"state_dtype": "8bit"}], ids=str)
@pytest.mark.parametrize("tiles", ["all", SOME], ids=str)
def test_moments_that_are_updated_after_all_weights_have_the_bits_of_memory_too(
        options: dict[str, Any], whole: bool, tiles: Any, without_disk: tiny_models.Shared, drive: Path) -> None:
    ours = streamed(without_disk.plain.dtype == torch.bfloat16, drive, disk_state=tiles, deferred_moments=True)
    before = ours.model.megacompile.stats
    assert same_bits(trained(ours, whole, steps=5, **options), trained(without_disk, whole, steps=5, **options))
    ops, after = update_of(ours.model), ours.model.megacompile.stats
    assert ops["update_weights"] == ops["update_moments"] == {*TILES} and not ops["update"]
    assert after["disk_bytes_read"] - before["disk_bytes_read"] == 2 * (
        after["disk_bytes_written"] - before["disk_bytes_written"]) > 0, "read for weights, and for moments"
    ours.close()


@pytest.mark.sample(1)
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


@pytest.mark.sample(1)
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
    engine.delay(model, delay)
    for seed in range(4):
        step(model, optimizer, seed, whole=False)
    assert same_bits(state_of(model, optimizer), expected)


def test_a_parameter_without_a_gradient_is_neither_read_nor_written(some_on_disk: tiny_models.Shared) -> None:
    model = some_on_disk.fresh()
    optimizer = megacompile.AdamW([p for name, p in model.named_parameters() if "layers.0" in name])
    before = model.megacompile.stats
    step(model, optimizer, 0, whole=False)
    model.megacompile.synchronize()
    after, tile = model.megacompile.stats, engine.layouts(model)["model.layers.0"]
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
    layouts = engine.layouts(all_on_disk.model).values()
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
    files = engine.store(ours.model).files
    first, before = weakref.ref(files[0]), ours.model.megacompile.stats
    assert same_bits(trained(ours, True, steps=3, state_dtype="8bit"), expected)
    after = ours.model.megacompile.stats
    gc.collect()
    assert first() is None and len(files) == 1 and 0 < after["disk_bytes"] < before["disk_bytes"]
    assert after["disk_bytes_written"] > before["disk_bytes_written"] > 0, "what is written to all files counts"
    second = files[0]
    trained(ours, True, steps=1, state_dtype="8bit")
    assert files == [second], "the same state stays where it is"
    ours.close()


def test_closing_frees_the_file_and_leaves_the_state_that_was_read(without_disk: tiny_models.Shared, drive: Path) -> None:
    ours = streamed(without_disk.plain.dtype == torch.bfloat16, drive)
    expected = trained(without_disk, True, steps=2)
    model = ours.fresh()
    optimizer = adamw(model)
    for seed in range(2):
        step(model, optimizer, seed, whole=True)
    file = weakref.ref(engine.store(model).files[0].file)
    state = state_of(model, optimizer)
    ours.close()
    gc.collect()
    assert file() is None and same_bits(state, expected)


def test_a_tensor_of_a_state_keeps_its_values_and_may_be_changed_until_the_next_step(some_on_disk: tiny_models.Shared) -> None:
    model = some_on_disk.fresh()
    optimizer = adamw(model)
    step(model, optimizer, 0, whole=True)
    weight = model.model.layers[0].mlp.up_proj.weight
    state = optimizer.state[weight]
    first = state["exp_avg"]
    kept, written = first.clone(), model.megacompile.stats["disk_bytes_written"]
    assert state["exp_avg"] is first and dict(state)["exp_avg"] is first and state.copy()["exp_avg"] is first
    assert torch.equal(dict(state.items())["exp_avg"], kept) and any(value is first for value in state.values())
    step(model, optimizer, 1, whole=True)
    model.megacompile.synchronize()
    assert torch.equal(first, kept) and not torch.equal(state["exp_avg"], kept)
    once = sum(engine.layouts(model)[tile].disk_bytes for tile in SOME)
    assert model.megacompile.stats["disk_bytes_written"] == written + once, "what was only read is not written back"
    state["exp_avg"].data.mul_(3)  # PyTorch does not track it
    expected = state["exp_avg"].clone()
    other = {index: dict(each) for index, each in optimizer.state_dict()["state"].items()}
    assert any(torch.equal(each["exp_avg"], expected) for each in other.values())
    held, old = optimizer.state[weight], state["exp_avg"]
    optimizer.state[weight] = {key: value * 2 for key, value in held.items()}
    assert torch.equal(held["exp_avg"], expected) and torch.equal(old, expected)
    assert torch.equal(optimizer.state[weight]["exp_avg"], 2 * expected)
    assert optimizer.state[weight].pop("step") == 4 and optimizer.state[weight].get("none", 5) == 5
    optimizer.state.pop(weight)
    step(model, optimizer, 2, whole=True)


def test_a_change_of_a_tensor_that_was_read_before_a_step_is_refused(some_on_disk: tiny_models.Shared) -> None:
    model = some_on_disk.fresh()
    optimizer = adamw(model)
    step(model, optimizer, 0, whole=True)
    moment = optimizer.state[model.model.layers[0].mlp.up_proj.weight]["exp_avg"]
    step(model, optimizer, 1, whole=True)
    moment.zero_()
    with pytest.raises(MegacompileError, match=r"exp_avg of model.layers.0.mlp.up_proj.weight, which is on disk, was changed "
                                               "in a tensor that was read before a step: read it from optimizer.state again"):
        step(model, optimizer, 2, whole=True)
    step(model, optimizer, 2, whole=True)


def test_a_state_that_memory_does_not_hold_is_refused(
        some_on_disk: tiny_models.Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    model = some_on_disk.fresh()
    optimizer = adamw(model)
    step(model, optimizer, 0, whole=True)
    monkeypatch.setattr(state, "available_host_bytes", lambda: 1000)
    with pytest.raises(InsufficientMemoryError, match=r"exp_avg of a parameter of model.layers.0 is on disk and takes [\d.]+ "
                                                      "KiB of host memory to read, and .* are available: drop what was read"):
        optimizer.state[model.model.layers[0].mlp.up_proj.weight]["exp_avg"]


# ---- checkpoints -----------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def in_memory() -> Streamed:
    return Streamed()


@pytest.fixture(scope="module")
def on_disk(drive: Path) -> Streamed:
    return Streamed(disk=drive, disk_state=("layers.0", "layers.2", "epilogue"))


@pytest.mark.sample(3)
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


def test_shared_memory_that_moments_return_to_is_known_to_have_old_values() -> None:
    """With several ranks: one optimizer's moments are in memory, the next one's on disk, and the third one's in memory."""
    layout = TileLayout.of("t", torch.float32, [("w", (256,), True)])
    tile = HostTile.allocate(layout, SharedMemory(layout.shared_pieces()))
    tile.allocate_moments()
    tile.moments[0].fill_(7)
    tile.moments_written = True
    tile.keep(layout, mock.Mock())
    tile.allocate_moments()
    assert not tile.moments_written
    tile.keep(layout)
    tile.allocate_moments()
    assert int(tile.moments[0][0]) == 7 and not tile.moments_are_zero
