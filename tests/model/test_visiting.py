"""Tiles that visit the device for their update have the bits of host updates, with any chunks and lane timing."""
from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import engine
import pytest
import tiny_models
import torch
from tiny_models import assert_torn, batch, cut_power, replanned, same_bits, state_of
from torch import Tensor

import megacompile
from megacompile.errors import MegacompileError
from megacompile.ir import program
from megacompile.ir.placement import Placements, Updated
from megacompile.ir.plan import Plan
from megacompile.ir.program import Lane, argument, find
from megacompile.planning.planner import fastest_device_updates
from megacompile.predict.hardware import Hardware
from megacompile.predict.simulate import StepTimes
from megacompile.runtime.backends.threads import ThreadBackend
from megacompile.runtime.memory import shards as of_tiles
from megacompile.runtime.memory.state_layout import ElementState
from megacompile.runtime.memory.tiles import HostTile, TileLayout
from megacompile.runtime.operations import visit
from megacompile.runtime.optimizer import host_update
from megacompile.runtime.optimizer.rule import Segment
from megacompile.runtime.optimizer.state_format import FORMATS, StateFormat
from megacompile.scheduling import Schedule
from megacompile.streaming.optimizer.adamw import RULE, Options

ROWS = 6


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer passes in several chunks, and no chunk ends where a parameter does."""
    monkeypatch.setattr(program, "VISITING_BYTES", 11_000)


shared = tiny_models.in_each_dtype


def step(model: Any, optimizer: Any, seed: int, whole: bool) -> None:
    if whole:
        model.megacompile.train_step(batch(seed, rows=ROWS), optimizer)
        return
    model(**batch(seed, rows=ROWS)).loss.backward()
    if seed == 2:
        model(**batch(seed + 100, rows=ROWS)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(model: Any, whole: bool, delay: Callable[[Lane], None] | None = None) -> dict[str, Tensor]:
    """Weights and optimizer state after five clipped steps."""
    engine.delay(model, delay)
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, eps=1e-4, max_grad_norm=1.0)
    for seed in range(5):
        step(model, optimizer, seed, whole)
    return state_of(model, optimizer)


@pytest.fixture(scope="module")
def at_home(shared: tiny_models.Shared) -> dict[bool, dict[str, Tensor]]:
    """By whether steps are whole."""
    return {whole: trained(replanned(shared), whole) for whole in (False, True)}


# ---- bits ------------------------------------------------------------------------------------------------------------

@pytest.mark.sample(3)
@pytest.mark.parametrize("options", [
    {"visiting_state": "all"}, {"visiting_state": ("prologue", "model.layers.1", "epilogue")},
    {"visiting_state": "all", "resident_state": ("model.layers.0",), "resident": ("model.layers.2",)}], ids=str)
@pytest.mark.parametrize("whole", [False, True], ids=["loop", "train_step"])
def test_visiting_tiles_get_the_bits_of_updates_on_the_host(
        options: dict[str, Any], whole: bool, shared: tiny_models.Shared, at_home: Any) -> None:
    model = replanned(shared, **options)
    assert same_bits(trained(model, whole), at_home[whole])
    updates = engine.trained(model).program.section("update")
    there = {argument(n, "tile") for n in find(updates, "update_on_device")}
    named = set(engine.tiles(model)) if options["visiting_state"] == "all" else {*options["visiting_state"]}
    assert {argument(n, "tile") for n in find(updates, "update_visiting")} == named - there
    engine.executor(model).idle()


def test_state_that_a_new_optimizer_replaces_does_not_stay_pinned(shared: tiny_models.Shared) -> None:
    """The system takes no pages back while they are pinned."""
    model = replanned(shared, visiting_state="all")
    pinned = {}
    trained(model, whole=True)  # makes the slabs, which are pinned too
    with (mock.patch.object(engine.backend(model), "pin", lambda part: pinned.setdefault(part.data_ptr(), part.nbytes)),
          mock.patch.object(engine.backend(model), "unpin", lambda part: pinned.pop(part.data_ptr(), None))):
        trained(model, whole=True)
        before = dict(pinned)
        megacompile.AdamW(model.parameters(), state_dtype="8bit")
        kept = {part.data_ptr() for tile in engine.tiles(model).values() for part in tile.state()}
        assert before.keys() > pinned.keys() <= kept


def test_waves_that_the_device_adds_up_visit_too(shared: tiny_models.Shared) -> None:
    expected = trained(replanned(shared, waves=3), True)
    assert same_bits(trained(replanned(shared, waves=3, visiting_state="all"), True), expected)


@pytest.mark.sample(2)
@pytest.mark.parametrize("straggler", [Lane.H2D, Lane.CPU, Lane.D2H, Lane.COMPUTE])
def test_late_lanes_change_no_bit(straggler: Lane, shared: tiny_models.Shared, at_home: Any) -> None:
    draw = random.Random(str(straggler))

    def delay(lane: Lane) -> None:
        if draw.random() < (0.2 if lane == straggler else 0.02):
            time.sleep(draw.random() * 2e-3)

    model = replanned(shared, visiting_state=("prologue", "model.layers.0", "model.layers.2"))
    assert same_bits(trained(model, True, delay), at_home[True])


@pytest.mark.parametrize("stored", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(("dtype", "exact"), [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)],
                         ids=["fp32", "bf16, fp32 master", "bf16 alone"])  # an FP32 weight is its own master
def test_a_chunk_may_end_anywhere_and_what_is_frozen_stays(dtype: torch.dtype, stored: StateFormat, exact: bool) -> None:
    layout = TileLayout.of("t", dtype, [("a", (700,), True), ("frozen", (300,), False), ("b", (33, 25), True)])
    layout = layout.with_states(dict.fromkeys("ab", ElementState(format=stored, exact=exact)))
    tile = HostTile.allocate(layout)
    tile.keep(layout)
    tile.allocate_gradients()
    tile.allocate_moments()
    assert tile.gradients is not None
    generator = torch.Generator().manual_seed(0)
    for part in (layout.flat(tile.weights), layout.flat(tile.gradients)):
        part.copy_(torch.randn(layout.elements, generator=generator))
    host = dataclasses.replace(tile, weights=tile.weights.clone(), moments=[moment.clone() for moment in tile.moments],
                               remainder=None if tile.remainder is None else tile.remainder.clone())
    before = layout.flat(tile.weights).clone()
    first, frozen, last = layout.slices
    for step in (1, 2):
        segments = [Segment(s.start, s.stop, Options(1e-2, 0.9, 0.99, 1e-8, decay), step, seed=7, position=position)
                    for position, s, decay in ((0, first, 0.1), (2, last, 0.0))]
        host_update.update(RULE, layout.flat(host.weights), host.remainder, layout.flat(tile.gradients),
                           of_tiles.at_home(segments, host, host.runs[0][1]), 0.5)
        visit(ThreadBackend(), RULE, torch.zeros(5000, dtype=torch.uint8), tile, segments, 0.5)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(
        [tile.weights, *tile.state()], [host.weights, *host.state()], strict=True))
    assert torch.equal(before[frozen.start:frozen.stop], layout.flat(tile.weights)[frozen.start:frozen.stop])
    assert not torch.equal(before, layout.flat(tile.weights))


# ---- failures --------------------------------------------------------------------------------------------------------

def test_an_update_that_stops_between_visits_is_completed(shared: tiny_models.Shared) -> None:
    def run(fails: bool) -> dict[str, Tensor]:
        model = replanned(shared, visiting_state="all")
        optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
        if fails:
            cut_power(model, "update_visiting", 3)
        step(model, optimizer, 0, whole=True)
        if fails:
            assert_torn(model)
            optimizer.step()
        step(model, optimizer, 1, whole=True)
        return state_of(model, optimizer)

    assert same_bits(run(fails=True), run(fails=False))


def test_plans_that_visit_with_updates_on_arrival_are_refused() -> None:
    with pytest.raises(MegacompileError, match="at the end of a step"):
        Plan(2, 8, (1, 1), update="arrival", placements=Placements.named(visiting_state=("a",)))


def test_with_updates_on_arrival_no_tile_visits_the_device(shared: tiny_models.Shared) -> None:
    model = replanned(shared, visiting_state="all")
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, overlap="backward")
    model.megacompile.train_step(batch(0, rows=ROWS), optimizer)
    assert model.megacompile.plan.visiting_state == () and model.megacompile.plan.update == "arrival"


# ---- plans -----------------------------------------------------------------------------------------------------------

def schedule(parameters_a_second: float, **options: Any) -> Schedule:
    """For an H200 whose host updates so fast."""
    hardware = dataclasses.replace(Hardware.find("h200"), adam=parameters_a_second)
    options = {"batch": 2, "length": 64, **options}
    return megacompile.schedule(tiny_models.build(bf16=True, hidden_size=64, intermediate_size=128, num_hidden_layers=6),
                                whole_step=True, hardware=hardware, resident_state=(), **options)


@pytest.mark.nightly(held_by="tests/model/test_visiting.py::test_the_best_number_of_visits_is_found")
def test_as_many_tiles_visit_as_make_a_step_faster_that_waits_for_the_host() -> None:
    slow = schedule(1e8)
    simulator, count = slow.planner.simulator, len(slow.plan.visiting_state)
    assert simulator is not None and count
    tiles = tuple(slow.planner.tiling.layouts)
    assert slow.plan.visiting_state == tiles[:count], "those that the next forward needs first"
    seconds = {n: simulator.cautious_s(slow.plan.placed(Updated.VISITING, tiles[:n]), True)
               for n in (0, count - 1, count, count + 1) if n <= len(tiles)}
    assert min(seconds, key=seconds.__getitem__) == count
    assert slow.planner.estimate(slow.plan).slots > slow.planner.estimate(slow.plan.placed(Updated.VISITING, ())).slots
    assert f"+ {count} visit" in slow.explain()


@pytest.mark.parametrize("count", range(1, 12))
def test_the_best_number_of_visits_is_found(count: int) -> None:
    """Each visit up to it makes the step faster, and each one beyond makes it slower."""
    held_up = StepTimes(1.0, {}, {Lane.CPU: 1.0})
    for best in range(count + 1):
        simulator: Any = SimpleNamespace(times=lambda plan, whole: held_up,
                                         cautious_s=lambda plan, whole, best=best: 10.0 + max(
            3 * (best - len(plan.visiting_state)), len(plan.visiting_state) - best))
        plans = [Plan(1, 1, (1,)).placed(Updated.VISITING, [f"layers.{i}" for i in range(n)]) for n in range(count + 1)]
        found = fastest_device_updates(plans, simulator, True)
        assert len(found.visiting_state) == best


@pytest.mark.nightly(held_by="tests/model/test_visiting.py::test_the_best_number_of_visits_is_found")
def test_checkpoints_go_to_the_host_where_visits_need_their_memory() -> None:
    options: dict[str, Any] = dict(batch=16, length=256, saved_layers=0)
    ample = schedule(1e8, **options)
    at_home = ample.plan.placed(Updated.VISITING, ())
    need = ample.planner.estimate(at_home).total + ample.planner.margin_bytes
    tight = schedule(1e8, device_memory=need, **options)
    assert ample.plan.host_checkpoints == 0 and 0 < tight.plan.host_checkpoints < 5
    assert tight.plan.visiting_state and tight.planner.fits(tight.plan)


@pytest.mark.nightly(held_by="tests/model/test_visiting.py::test_the_best_number_of_visits_is_found")
@pytest.mark.parametrize(("speed", "options"), [(1e13, {}), (1e8, {"visiting_state": ()}), (1e8, {"update": "arrival"}),
                                                (1e8, {"pinned_memory": "1GiB"})], ids=str)
def test_none_visit_where_it_gains_nothing_or_is_not_wanted(speed: float, options: dict[str, Any]) -> None:
    assert schedule(speed, **options).plan.visiting_state == ()
