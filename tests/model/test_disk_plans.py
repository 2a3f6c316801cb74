"""Which tiles have their moments on disk, what plans say about it, and what is refused."""
from __future__ import annotations

import dataclasses
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import engine
import pytest
import tiny_models
import torch
from disk_models import ROWS, SOME, TILES, adamw, streamed, trained, update_of
from shapes import config
from tiny_models import batch, same_bits
from transformers import AutoModelForCausalLM

import megacompile
from megacompile.errors import DiskError, InsufficientMemoryError, MegacompileError, ProgramError
from megacompile.ir.plan import STATE_SLABS
from megacompile.ir.program import Lane
from megacompile.planning import host_needs
from megacompile.planning.config import StreamConfig
from megacompile.planning.host_needs import with_disk
from megacompile.predict.hardware import DISK, Hardware
from megacompile.sizes import format_bytes
from megacompile.tools.calibrate import with_disk_rates

# ---- which tiles -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("options", "message"), [
    ({"disk": 3}, "disk must be the path of a folder on a local drive, not 3"),
    ({"disk": ""}, "disk must be the path of a folder on a local drive, not ''"),
    ({"disk_state": "all"}, "disk_state names tiles whose moments are on disk, but no disk is given: add disk"),
    ({"disk": "state", "disk_state": ("a",), "visiting_state": ("a",)}, "visiting_state and disk_state both name a"),
    ({"disk": "state", "state_slabs": 0}, "state_slabs")])
def test_options_that_say_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MegacompileError, match=message):
        StreamConfig.of(**options)


@pytest.mark.nightly(held_by="tests/model/test_disk_plans.py::test_options_that_say_nothing_are_refused")
def test_tiles_that_cannot_be_on_disk_are_refused_with_the_reason(drive: Path) -> None:
    with pytest.raises(MegacompileError, match=r"disk_state names model.layers.9, which are not tiles of"):
        streamed(False, drive, disk_state=("model.layers.9",))
    frozen = tiny_models.build()
    frozen.model.layers[1].requires_grad_(False)
    with pytest.raises(MegacompileError, match=r"disk_state names model.layers.1, whose moments cannot be on disk \(it is "
                                               r"frozen\): leave it out; prologue, model.layers.0"):
        megacompile.stream(frozen, device="cpu", disk=drive, disk_state=("model.layers.1",))
    ours = streamed(True, drive, disk_state=("model.layers.1",))
    with pytest.raises(MegacompileError, match=r"cannot be on disk \(whole matrices are updated on the device\)"):
        megacompile.Muon(ours.fresh().parameters())
    ours.close()


@pytest.mark.nightly(held_by="tests/model/test_disk_plans.py::test_training_that_does_not_fit_host_memory_fits_with_a_disk")
@pytest.mark.parametrize("optim", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("update", ["step", "arrival"])
def test_several_ranks_read_and_write_their_shares(drive: Path, optim: str, update: str) -> None:
    """All ranks share the drives, so a step moves the bytes of one rank's plan, but for padding."""
    model = tiny_models.build(bf16=True, hidden_size=64, intermediate_size=128, num_hidden_layers=8)
    hardware = dataclasses.replace(Hardware.find("8xh200"), disk={"read": 1e7, "write": 1e7})
    one, four = (megacompile.schedule(model, batch=2, length=64, whole_step=True, hardware=hardware, disk=drive, optim=optim,
                                      update=update, disk_state="all", gpus=gpus) for gpus in (1, 4))
    sizes = [{tile.name: tile.disk_bytes for tile in found.program().tiles.values()} for found in (one, four)]
    for tile, size in sizes[0].items():
        assert size <= 4 * sizes[1][tile] <= size + 4 * (4096 + 6 * 256 * len(one.tiling.layouts[tile].slices))
    for found, each, ranks in ((one, sizes[0], 1), (four, sizes[1], 4)):
        assert found.simulate().busy_s[Lane.DISK_WRITE] == pytest.approx(ranks * sum(each.values()) / 1e7)
        text = found.explain()
        assert f"the moments of 10 of 10 tiles, {format_bytes(ranks * sum(each.values()))}, are read and written" in text
    slabs = [found.planner.host_parts(dataclasses.replace(found.plan, state_slabs=2))["state slabs"] for found in (one, four)]
    assert slabs[0] <= slabs[1] <= slabs[0] + 3 * 4 * 2 * 4096 + 10**5


def tiling_of(**options: Any) -> Any:
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=8)
    return megacompile.schedule(tiny_models.build(bf16=True, **sizes), batch=2, length=8, hardware="h200", **options).tiling


@pytest.mark.nightly(held_by="tests/model/test_disk_plans.py::test_training_that_does_not_fit_host_memory_fits_with_a_disk")
def test_the_fewest_tiles_are_on_disk_that_let_training_fit_spread_over_the_layers(drive: Path) -> None:
    tiling = tiling_of()
    config = StreamConfig.of(disk=drive)
    needed = host_needs.tiles_bytes(tiling, on_arrival=False)
    assert with_disk(tiling, config, needed, on_arrival=False).on_disk == ()
    before = 0
    for room in range(needed - 1, needed - sum(layout.disk_bytes for layout in tiling.layouts.values()), -20_000):
        found = with_disk(tiling, config, room, on_arrival=False)
        count = len(found.on_disk)
        if host_needs.tiles_bytes(found, on_arrival=False) > room:
            assert count == len(tiling.layouts), "all that can be"
            break
        if host_needs.tiles_bytes(found, False, STATE_SLABS) > room:
            continue  # with one slab, fewer tiles may do
        layers = [int(tile.rpartition(".")[2]) for tile in found.on_disk if "layers" in tile]
        gaps = [after - first for first, after in pairwise(layers)]
        assert max(gaps, default=1) <= min(gaps, default=1) + 1, f"evenly spread: {layers}"
        assert count >= before and (len(layers) == 8 or count == len(layers)), "boundary tiles last"
        before = count
    assert before > 2


@pytest.mark.nightly(held_by="tests/model/test_disk_plans.py::test_training_that_does_not_fit_host_memory_fits_with_a_disk")
def test_tiles_whose_moments_are_somewhere_stay_there(drive: Path) -> None:
    tiling, config = tiling_of(), StreamConfig.of(disk=drive)
    room = host_needs.tiles_bytes(tiling, on_arrival=False) - 100_000
    there, in_memory = {"model.layers.5"}, {"model.layers.0", "model.layers.3"}
    found = with_disk(tiling, config, room, False, there=there, in_memory=in_memory)
    assert there < set(found.on_disk) and not in_memory & set(found.on_disk)
    assert host_needs.tiles_bytes(found, on_arrival=False) <= room


def test_training_that_does_not_fit_host_memory_fits_with_a_disk(drive: Path, without_disk: tiny_models.Shared) -> None:
    bf16 = without_disk.plain.dtype == torch.bfloat16
    tiling = engine.tiling(without_disk.model)
    there = host_needs.tiles_bytes(tiling, on_arrival=False) - 20_000
    ours = tiny_models.Shared(bf16=bf16, micro_batch_size=2, host_memory=there)
    with pytest.raises(InsufficientMemoryError, match="training with this optimizer takes") as caught:
        adamw(ours.model)
    ours.close()
    proposed = re.search(r"\nor keep moments on a local drive \(disk='/nvme/state'\): then it takes (\S+ GiB) of host memory "
                         r"and (\S+ KiB) of the drive, and each step writes (\S+ KiB)$", str(caught.value))
    assert proposed is not None, caught.value
    expected = trained(without_disk, True, steps=3)
    ours = tiny_models.Shared(bf16=bf16, micro_batch_size=2, host_memory=there, disk=drive)
    assert same_bits(trained(ours, True, steps=3), expected)
    on_disk = ours.model.megacompile.plan.disk_state
    written = sum(tiling.layouts[tile].disk_bytes for tile in on_disk)
    assert proposed[2] == proposed[3] == format_bytes(written)
    assert 0 < len(on_disk) < len(TILES) and update_of(ours.model)["write_state"] == {*on_disk}
    ours.close()


# ---- predictions -----------------------------------------------------------------------------------------------------

def planned(read: float, write: float, **options: Any) -> Any:
    """For an H200 with such a disk, and a model whose update takes long beside its forward."""
    hardware = dataclasses.replace(Hardware.find("h200"), disk={"read": read, "write": write})
    model = tiny_models.build(bf16=True, hidden_size=64, intermediate_size=128, num_hidden_layers=8)
    return megacompile.schedule(model, batch=2, length=64, whole_step=True, hardware=hardware, disk="/nvme/state",
                                **{"disk_state": "all", **options})


@pytest.mark.nightly(held_by="tests/model/test_disk_plans.py::test_training_that_does_not_fit_host_memory_fits_with_a_disk")
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


@pytest.mark.nightly(held_by="tests/model/test_disk_plans.py::test_training_that_does_not_fit_host_memory_fits_with_a_disk")
def test_moments_on_disk_are_updated_after_all_weights_where_the_next_forward_would_wait_for_their_writes() -> None:
    """Where the disk is fast, they are not: that reads them twice."""
    slow = planned(6e9, 2e9)
    seconds = {deferred: slow.planner.simulator.times(dataclasses.replace(slow.plan, deferred_moments=deferred), True).step_s
               for deferred in (False, True)}
    assert slow.plan.deferred_moments and seconds[True] < 0.97 * seconds[False], seconds
    assert "are read twice and written in each step" in slow.explain()
    assert not planned(1e12, 1e12).plan.deferred_moments
    assert not planned(6e9, 2e9, deferred_moments=False).plan.deferred_moments


@pytest.mark.nightly(held_by="tests/model/test_disk_plans.py::test_training_that_does_not_fit_host_memory_fits_with_a_disk")
def test_layers_of_a_70b_model_with_smaller_moments_on_four_drives_keep_the_rate_in_memory() -> None:
    """As `benchmarks/disk_plans.py` finds for all 80 layers."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config("llama-70b", 8), dtype=torch.bfloat16)
    in_memory, on_disk = (
        megacompile.schedule(model, batch=64, length=1024, hardware="h200", whole_step=True, optim="adamw_bf16",
                             host_memory=there, disk=disk) for there, disk in (("1TiB", None), ("74GiB", "/nvme/state")))
    assert len(on_disk.plan.disk_state) > len(on_disk.tiling.layouts) / 2 and not in_memory.plan.disk_state
    assert in_memory.simulate().step_s >= 0.95 * on_disk.simulate().step_s


@pytest.mark.nightly(held_by="tests/model/test_disk_plans.py::test_training_that_does_not_fit_host_memory_fits_with_a_disk")
def test_as_few_slabs_are_chosen_as_leave_a_step_as_fast() -> None:
    found = planned(3e7, 2e7)
    simulator = found.planner.simulator
    seconds = {count: simulator.cautious_s(dataclasses.replace(found.plan, state_slabs=count), True) for count in range(1, 9)}
    assert 1 < found.plan.state_slabs < 8
    assert seconds[found.plan.state_slabs] <= 1.003 * min(seconds.values()) < seconds[found.plan.state_slabs - 1]
    assert planned(3e7, 2e7, state_slabs=5).plan.state_slabs == 5
    slabs = {slot for slot in found.program().slots if slot[0] == "M"}
    assert slabs == {"MB0", *(f"M{number}" for number in range(found.plan.state_slabs))}


@pytest.mark.nightly(held_by="tests/model/test_disk_plans.py::test_training_that_does_not_fit_host_memory_fits_with_a_disk")
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
    with pytest.raises(DiskError, match=r"the drive of \S+ failed while it was measured \(the file ended\): check the drive"):
        with_disk_rates(found, tmp_path, 1e-3)


def test_a_program_with_moments_on_disk_is_loaded_from_its_text(drive: Path) -> None:
    ours = streamed(True, drive, disk_state=SOME, state_slabs=2)
    model = ours.fresh()
    adamw(model)
    text = model.megacompile.text(batch(0, rows=ROWS))
    assert 'disk_state=("model.layers.0", "model.layers.2")' in text and "state_slabs=2" in text
    model.megacompile.load_program(text)
    assert model.megacompile.text(batch(0, rows=ROWS)) == text
    other = text.replace('disk_state=("model.layers.0", "model.layers.2")', 'disk_state=("model.layers.0",)')
    with pytest.raises(ProgramError, match=r"the plan has the optimizer state of model\.layers\.0 on disk, and this"):
        model.megacompile.load_program(other)
    ours.close()
