"""A resumed run has the bits of an uninterrupted one, and a save has the state of one moment."""
from __future__ import annotations

import copy
import threading
import time
from pathlib import Path
from typing import Any

import engine
import pytest
import torch
from resumable import Run, Streamed
from tiny_models import batch, same_bits, weights
from torch import fx, nn

import megacompile
from megacompile import CheckpointWriter, load_checkpoint, save_checkpoint
from megacompile.checkpoint import files
from megacompile.checkpoint.manifest import Manifest, moments
from megacompile.errors import CheckpointError, LaneError, MegacompileError, TornError, UnsupportedError
from megacompile.ir.program import argument, op_of

#: How a step is done: clipped or on arrival, in a loop or as one program.
STEPS = [(overlap, whole) for overlap in (None, "backward") for whole in (False, True)]


@pytest.fixture(scope="module")
def one() -> Streamed:
    return Streamed()


@pytest.fixture(scope="module")
def other() -> Streamed:
    """The same model under another plan: blocks of two layers, a tile resident, others updated there, moments last."""
    return Streamed(checkpoint_interval=2, resident=("layers.1", "layers.0"), resident_state=("layers.0",),
                    visiting_state=("layers.1", "epilogue"), deferred_moments=True, pinned_memory="32KiB")


@pytest.mark.sample(2)
@pytest.mark.parametrize(("overlap", "whole"), STEPS, ids=str)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # train_step is no step() that it could see
def test_ten_steps_are_five_a_resume_and_five(
        one: Streamed, other: Streamed, tmp_path: Path, overlap: Any, whole: bool) -> None:
    """Losses, weights, remainders and moments; under the same plan and under another."""
    torch.manual_seed(1)
    run = Run(one.fresh(), overlap, whole)
    with CheckpointWriter(tmp_path, run.model, run.optimizer, scheduler=run.scheduler) as writer:
        run.steps(5)
        writer.save(extra={"position": (5, "five")})
        expected = run.steps(5), run.masters(), run.moments(), run.scheduler.state_dict()
    for shared in (one, other):
        again = Run(shared.fresh(), overlap, whole)
        again.steps(2)
        extra = load_checkpoint(tmp_path, again.model, again.optimizer, scheduler=again.scheduler)
        assert extra == {"position": (5, "five")}
        assert again.steps(5) == expected[0]
        assert same_bits(again.masters(), expected[1]) and same_bits(again.moments(), expected[2])
        assert again.scheduler.state_dict() == expected[3]


def test_a_save_before_the_first_step_and_a_run_that_updates_on_the_device_resume(other: Streamed, tmp_path: Path) -> None:
    torch.manual_seed(2)
    run = Run(other.fresh())
    for steps in (0, 3):
        run.steps(steps)
        save_checkpoint(tmp_path, run.model, run.optimizer, scheduler=run.scheduler)
        expected = run.steps(2)
        load_checkpoint(tmp_path, run.model, run.optimizer, scheduler=run.scheduler)
        assert run.steps(2) == expected
        load_checkpoint(tmp_path, run.model, run.optimizer, scheduler=run.scheduler)


def test_an_optimizer_of_some_parameters_keeps_the_remainders_of_the_others(one: Streamed, tmp_path: Path) -> None:
    Run(one.fresh()).steps(2)
    optimizer = megacompile.AdamW([one.model.head.weight])

    def remainders() -> list[torch.Tensor]:
        tiles = engine.tiles(one.model).values()
        return [tile.remainder.clone() for tile in tiles if tile.remainder is not None]  # what is frozen has none

    expected = remainders()
    save_checkpoint(tmp_path, one.model, optimizer)
    engine.of(one.fresh()).adopt_writes()
    assert not any(r.any() for r in remainders())
    load_checkpoint(tmp_path, one.model, optimizer)
    assert all(map(torch.equal, remainders(), expected)) and all(r.any() for r in expected)


def test_a_load_leaves_no_gradients_of_the_weights_before_it(one: Streamed, tmp_path: Path) -> None:
    run = Run(one.fresh())
    optimizer = megacompile.AdamW([run.model.head.weight])
    save_checkpoint(tmp_path, run.model, optimizer)
    run.model(**batch(0)).backward()
    load_checkpoint(tmp_path, run.model, optimizer)
    assert all(parameter.grad is None for parameter in run.model.parameters())


def test_a_parameter_whose_state_was_removed_starts_anew_after_a_resume(one: Streamed, tmp_path: Path) -> None:
    run = Run(one.fresh())
    run.steps(2)
    run.model.megacompile.synchronize()
    run.optimizer.state.pop(run.model.head.bias)
    saved = Manifest.read(save_checkpoint(tmp_path, run.model, run.optimizer, scheduler=run.scheduler)).tensors
    assert saved["head.bias"].step is None and not moments(saved["head.bias"].parts)
    assert saved["head.weight"].step == 2 and moments(saved["head.weight"].parts) == ["exp_avg", "exp_avg_sq"]
    again = Run(one.fresh())
    again.steps(1)
    load_checkpoint(tmp_path, again.model, again.optimizer, scheduler=again.scheduler)
    state = again.optimizer.state[again.model.head.bias]
    assert state["step"] == 0 and not state["exp_avg"].any() and not state["exp_avg_sq"].any()
    assert again.optimizer.state[again.model.head.weight]["exp_avg"].any()


def test_a_checkpoint_repairs_a_torn_update_and_torn_weights_are_not_saved(one: Streamed, tmp_path: Path) -> None:
    run = Run(one.fresh(), "backward")
    run.steps(1)
    save_checkpoint(tmp_path, run.model, run.optimizer, scheduler=run.scheduler)
    expected = run.steps(2)

    def probe(node: fx.Node) -> None:
        if op_of(node).name == "update" and argument(node, "tile") == "layers.0":
            engine.probe(run.model, None)
            raise RuntimeError("power cut")

    engine.probe(run.model, probe)
    with pytest.raises(LaneError, match="power cut"):
        run.steps(2)
    with pytest.raises(TornError, match=r"megacompile\.load_checkpoint"):
        save_checkpoint(tmp_path, run.model, run.optimizer)
    load_checkpoint(tmp_path, run.model, run.optimizer, scheduler=run.scheduler)
    assert run.steps(2) == expected


# ---------------------------------------------------------------- beside training

class SlowDisk:
    """Files stop growing while it is `held`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held, write = threading.Event(), files.os.write
        self.open = threading.Event()

        def slow(descriptor: int, data: Any) -> int:
            self.held.set()
            assert self.open.wait(20), "nobody opens the disk"
            return write(descriptor, data[:1000])

        monkeypatch.setattr(files.os, "write", slow)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    return SlowDisk(monkeypatch)


@pytest.mark.parametrize("overlap", [None, "backward"])
@pytest.mark.parametrize("which", ["one", "other"])
def test_steps_that_overtake_the_writer_do_not_change_what_is_saved(
        which: str, overlap: Any, tmp_path: Path, slow_disk: SlowDisk, request: pytest.FixtureRequest) -> None:
    """Memory for copies: three steps and a read of the optimizer's state pass while the disk stands still."""
    run = Run(request.getfixturevalue(which).fresh(), overlap)
    run.steps(2)
    expected = run.masters(), run.moments()
    with CheckpointWriter(tmp_path, run.model, run.optimizer, scheduler=run.scheduler, copy_memory="1GiB") as writer:
        writer.save()
        assert slow_disk.held.wait(20)
        run.steps(3)
        assert not same_bits(run.masters(), expected[0]) and not same_bits(run.moments(), expected[1])
        slow_disk.open.set()
    load_checkpoint(tmp_path, run.model, run.optimizer, scheduler=run.scheduler)
    assert same_bits(run.masters(), expected[0]) and same_bits(run.moments(), expected[1])


def test_without_memory_for_copies_an_update_waits_for_the_writer(one: Streamed, tmp_path: Path, slow_disk: SlowDisk) -> None:
    run = Run(one.fresh())
    run.steps(2)
    expected = run.masters(), run.moments()
    with CheckpointWriter(tmp_path, run.model, run.optimizer, scheduler=run.scheduler, copy_memory=0) as writer:
        writer.save()
        run.steps(1)
        time.sleep(0.05)
        assert engine.updating(run.model).done == set(), "an update did not wait"
        slow_disk.open.set()
        run.steps(1)
        assert writer.wait() == tmp_path / "000001-step-2"
    load_checkpoint(tmp_path, run.model, run.optimizer, scheduler=run.scheduler)
    assert same_bits(run.masters(), expected[0]) and same_bits(run.moments(), expected[1])


def test_a_little_memory_for_copies_is_used_again_and_again(one: Streamed, tmp_path: Path) -> None:
    """Room for one tile at a time: some updates copy, some wait, and the saved state is that of the save."""
    run = Run(one.fresh())
    run.steps(1)
    for _ in range(5):
        expected = run.masters()
        with CheckpointWriter(tmp_path, run.model, run.optimizer, scheduler=run.scheduler, copy_memory="40KiB") as writer:
            writer.save()
            run.steps(2)
        load_checkpoint(tmp_path, run.model, run.optimizer, scheduler=run.scheduler)
        assert same_bits(run.masters(), expected)


@pytest.mark.parametrize("write", [
    lambda run, model, optimizer, path: run.model.load_state_dict(model),
    lambda run, model, optimizer, path: run.optimizer.set_master(run.model.head.weight, torch.zeros(64, 16)),
    lambda run, model, optimizer, path: Run(run.model),  # a new optimizer's moments are zero
    lambda run, model, optimizer, path: megacompile.AdamW(run.model.parameters(), state_dtype="bfloat16"),  # laid out anew
    lambda run, model, optimizer, path: run.optimizer.load_state_dict(optimizer),
    lambda run, model, optimizer, path: load_checkpoint(path, run.model, run.optimizer)],
    ids=["load_state_dict", "set_master", "new optimizer", "optimizer of another state", "optimizer.load_state_dict",
         "load_checkpoint"])
def test_our_own_writes_wait_for_the_writer_too(write: Any, one: Streamed, tmp_path: Path, slow_disk: SlowDisk) -> None:
    run = Run(one.fresh())
    run.steps(1)
    slow_disk.open.set()
    path = save_checkpoint(tmp_path / "earlier", run.model, run.optimizer)
    earlier = weights(run.model), copy.deepcopy(run.optimizer.state_dict()), path
    slow_disk.open.clear()
    slow_disk.held.clear()
    run.steps(2)
    expected = run.masters(), run.moments()
    with CheckpointWriter(tmp_path, run.model, run.optimizer, scheduler=run.scheduler) as writer:
        writer.save()
        assert slow_disk.held.wait(20)
        threading.Timer(0.1, slow_disk.open.set).start()  # some writes wait for the writer
        write(run, *earlier)
    run = Run(run.model)
    load_checkpoint(tmp_path, run.model, run.optimizer, scheduler=run.scheduler)
    assert same_bits(run.masters(), expected[0]) and same_bits(run.moments(), expected[1])


def test_a_write_from_outside_spoils_the_save_and_is_told(one: Streamed, tmp_path: Path, slow_disk: SlowDisk) -> None:
    run = Run(one.fresh())
    writer = CheckpointWriter(tmp_path, run.model, run.optimizer, scheduler=run.scheduler)
    writer.save()
    with torch.no_grad():
        run.model.head.weight.add_(1.0)
    slow_disk.open.set()
    with pytest.raises(CheckpointError, match=r"written from outside before they were saved.*call wait\(\) before"):
        writer.close()
    assert list(tmp_path.iterdir()) == []
    run.steps(1)
    writer.save()
    writer.close()


def test_a_bandwidth_is_kept_unless_an_update_waits(one: Streamed, tmp_path: Path) -> None:
    run = Run(one.fresh())
    run.steps(1)
    size = sum(f.stat().st_size for f in save_checkpoint(tmp_path, run.model, run.optimizer).glob("*.safetensors"))

    def seconds(**options: Any) -> tuple[float, float]:
        """Until the step's update has ended, and until all is written."""
        begin = time.monotonic()
        with CheckpointWriter(tmp_path, run.model, run.optimizer, **options) as writer:
            writer.save()
            run.steps(1)
            run.model.megacompile.synchronize()
            updated = time.monotonic() - begin
        return updated, time.monotonic() - begin

    assert seconds(bandwidth=4 * size, copy_memory="1GiB")[1] > 0.15
    assert seconds(bandwidth=size // 20, copy_memory=0)[0] < 10, "it would take twenty seconds; the rest may"


def test_a_writer_that_cannot_begin_holds_nothing_up(
        one: Streamed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, begun, start = Run(one.fresh()), [], threading.Thread.start

    def second_fails(thread: threading.Thread) -> None:
        if thread.name == "megacompile checkpoint" and (begun.append(thread) or len(begun) == 2):
            raise RuntimeError("can't start new thread")
        start(thread)

    run.steps(1)
    writer = CheckpointWriter(tmp_path, run.model, run.optimizer, scheduler=run.scheduler, copy_memory=0)
    monkeypatch.setattr(threading.Thread, "start", second_fails)
    with pytest.raises(RuntimeError, match="can't start"):
        writer.save()
    monkeypatch.undo()
    run.steps(2)
    run.model.megacompile.synchronize()
    begun[0].join()
    writer.save()
    writer.close()
    assert [p.name for p in tmp_path.iterdir()] == ["000001-step-3"]


def test_what_a_checkpoint_is_not_of_is_refused(one: Streamed, tmp_path: Path) -> None:
    run = Run(one.fresh())
    with pytest.raises(UnsupportedError, match="not of a SGD"):
        CheckpointWriter(tmp_path, run.model, torch.optim.SGD(run.model.parameters()))
    with pytest.raises(MegacompileError, match="not streamed"):
        save_checkpoint(tmp_path, nn.Linear(2, 2), run.optimizer)
    with pytest.raises(MegacompileError, match="keep must be a whole number of at least 1, not 0"):
        CheckpointWriter(tmp_path, run.model, run.optimizer, keep=0)
    with pytest.raises(CheckpointError, match=r"extra\['f'\] is a function, which a checkpoint cannot hold"):
        save_checkpoint(tmp_path, run.model, run.optimizer, extra={"f": lambda: None})
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"nothing can be saved in .*file"):
        save_checkpoint(tmp_path / "file", run.model, run.optimizer)
    arriving = Run(run.model, "backward")
    run.model(**batch(0)).backward()
    with pytest.raises(MegacompileError, match=r"save after optimizer\.step"):
        save_checkpoint(tmp_path, run.model, arriving.optimizer)
    arriving.optimizer.step()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_closing_the_model_leaves_the_save_as_it_was(
        one: Streamed, other: Streamed, tmp_path: Path, slow_disk: SlowDisk) -> None:
    run = Run(other.fresh())
    run.steps(1)
    expected = weights(run.model)
    writer = CheckpointWriter(tmp_path, run.model, run.optimizer, scheduler=run.scheduler)
    writer.save()
    assert slow_disk.held.wait(20)
    run.model.megacompile.close()
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.zero_()
    slow_disk.open.set()
    path = writer.wait()
    with pytest.raises(MegacompileError, match="not streamed"):
        writer.save()
    again = Run(one.fresh())
    load_checkpoint(path, again.model, again.optimizer, scheduler=again.scheduler)
    assert same_bits(weights(again.model), expected)
