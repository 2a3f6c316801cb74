"""The measured timeline has the same content as a simulated one, for a step that ran."""
from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import engine
import pytest
import tiny_models
import torch
from other_lanes import OtherLanes
from tiny_models import batch, train_step

import megacompile
from megacompile.errors import LaneError, MegacompileError
from megacompile.ir.program import Lane, lane_of, nodes, op_of, operands
from megacompile.predict.simulate import Item, Timeline, simulate, step_of
from megacompile.runtime.backends import lanes
from megacompile.runtime.backends.lanes import CudaTimestamps, HostTimestamps
from megacompile.runtime.operations import OPERATIONS
from megacompile.runtime.reference import ReferenceExecutor


@pytest.fixture
def optimizer(model: Any) -> megacompile.AdamW:
    return megacompile.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)


def recorded(model: Any, optimizer: megacompile.AdamW, steps: int = 2) -> Timeline:
    with model.megacompile.record() as recording:
        for seed in range(steps):
            train_step(model, optimizer, seed)
    return recording.timeline()


def by_lane(timeline: Timeline) -> dict[Lane, list[Item]]:
    return {lane: [item for item in timeline.items if item.lane == lane] for lane in Lane}


def test_each_instruction_of_each_step_is_there_once_as_in_a_simulation(model: Any, optimizer: megacompile.AdamW) -> None:
    found = recorded(model, optimizer, steps=2)
    program = model.megacompile.program()
    predicted = simulate(program, lambda node: 1.0, steps=2)
    assert Counter((i.step, i.section, i.node) for i in found.items) == Counter(
        (i.step, i.section, i.node) for i in predicted.items)
    expected = {n for s in step_of(program) for n in nodes(program.section(s)) if lane_of(n) and op_of(n).name != "record"}
    assert {i.node for i in found.items} == expected


def test_a_lane_takes_its_instructions_in_order_and_one_at_a_time(model: Any, optimizer: megacompile.AdamW) -> None:
    found = recorded(model, optimizer)
    predicted = by_lane(simulate(model.megacompile.program(), lambda node: 1.0, steps=2))
    for lane, items in by_lane(found).items():
        assert [i.node for i in items] == [i.node for i in predicted[lane]], lane
        ends = [0.0, *(i.end_s for i in items)]
        assert all(end <= i.start_s <= i.end_s for end, i in zip(ends, items, strict=False)), lane


def test_what_waits_for_another_lane_starts_after_it(model: Any, optimizer: megacompile.AdamW) -> None:
    found = recorded(model, optimizer)
    start = {(i.step, i.node): i.start_s for i in found.items}
    end = {(i.step, i.node): i.end_s for i in found.items}
    waits = [i for i in found.items if op_of(i.node).name == "wait"]
    crossed = 0
    for wait in waits:
        (event,) = operands(wait.node, "event")
        if op_of(event).name == "record":
            (source,) = operands(event, "node")
            assert end[wait.step, source] <= start[wait.step, wait.node]
            crossed += 1
    assert crossed > 10
    assert any(i.cause is not None and i.cause.lane != i.lane and i.cause.section != i.section for i in waits), "an update"


def slowed(monkeypatch: pytest.MonkeyPatch, wait: Callable[[], None]) -> None:
    """Each prefetch waits before it copies."""
    prefetch = OPERATIONS["prefetch"]
    monkeypatch.setitem(OPERATIONS, "prefetch", lambda frame, node: (wait(), prefetch(frame, node))[1])


def prefetches(timeline: Timeline) -> list[Item]:
    """Those of the second step."""
    return [i for i in timeline.items if op_of(i.node).name == "prefetch" and i.step == 1]


def test_a_lane_is_busy_for_as_long_as_its_instructions_take(
        model: Any, optimizer: megacompile.AdamW, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only prefetches, one after the other, move on."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    train_step(model, optimizer)
    monkeypatch.setattr(lanes, "time", clock)
    slowed(monkeypatch, lambda: setattr(clock, "now", clock.now + 0.01))
    found = recorded(model, optimizer)
    copies = prefetches(found)
    assert len(copies) >= 5 and all(i.seconds == pytest.approx(0.01) for i in copies)
    assert found.busy_s[Lane.H2D] == pytest.approx(0.01 * len(copies)) == pytest.approx(found.step_s)
    assert all(0.0 <= found.occupancy(lane) <= 1.0 + 1e-9 for lane in Lane)
    assert "h2d" in found.table() and found.table().startswith(f"step: {found.step_s:.3f} s")


def test_the_lane_that_the_others_wait_for_binds(
        model: Any, optimizer: megacompile.AdamW, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that moves on in prefetches, and only while every other lane waits for one."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    others = OtherLanes(engine.executor(model), monkeypatch)

    def second() -> None:
        others.hold(Lane.H2D)
        clock.now += 1.0

    train_step(model, optimizer)
    monkeypatch.setattr(lanes, "time", clock)
    slowed(monkeypatch, second)
    found = recorded(model, optimizer)
    copies = float(len(prefetches(found)))
    alone = {lane: copies if lane == Lane.H2D else 0.0 for lane in Lane}
    assert copies >= 5 and found.step_s == copies and found.busy_s == alone and found.critical_s == alone
    assert {lane: found.occupancy(lane) for lane in Lane} == {lane: float(lane == Lane.H2D) for lane in Lane}
    assert found.binds == Lane.H2D


def test_a_step_ends_with_its_update_however_many_backwards_it_has(model: Any, optimizer: megacompile.AdamW) -> None:
    with model.megacompile.record() as recording:
        for _ in range(2):
            for seed in range(2):
                (model(**batch(seed)).loss / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = recording.timeline()
    assert len(found.steps_s) == 2
    assert [sum(i.section == "update" and i.step == step for i in found.items) > 0 for step in (0, 1)] == [True, True]
    assert {i.section for i in found.items if i.step == 1} == {"forward", "backward", "backward_accumulate", "update"}


@pytest.mark.parametrize(("overlap", "sections"), [("backward", {"train_step"}), (None, {"train_step", "update"})])
def test_whole_steps_are_recorded_too(model: Any, overlap: str | None, sections: set[str]) -> None:
    optimizer = megacompile.AdamW(model.parameters(), overlap=overlap)
    with model.megacompile.record() as recording:
        for seed in range(3):
            model.megacompile.train_step(batch(seed), optimizer)
    found = recording.timeline()
    assert {i.section for i in found.items} == sections and len(found.steps_s) == 3
    assert 0 < found.step_s < found.steps_s[-1]


def test_a_loop_that_updates_on_arrival_is_recorded_step_by_step(model: Any) -> None:
    optimizer = megacompile.AdamW(model.parameters(), overlap="backward")
    with model.megacompile.record() as recording:
        for seed in range(3):
            model(**batch(seed)).loss.backward()
            optimizer.step()
    found = recording.timeline()
    assert [{i.section for i in found.items if i.step == n} for n in range(4)] == [{"forward", "backward"}] * 3 + [set()]


def test_nothing_is_recorded_and_no_time_is_taken_outside_a_recording(
        model: Any, optimizer: megacompile.AdamW, monkeypatch: pytest.MonkeyPatch) -> None:
    with model.megacompile.record() as recording:
        train_step(model, optimizer)
    before = len(recording.timeline().items)
    monkeypatch.setattr(HostTimestamps, "stamp", lambda self, lane: pytest.fail("a time was taken"))
    train_step(model, optimizer)
    model.megacompile.synchronize()
    assert len(recording.timeline().items) == before
    assert engine.executor(model).recorder is None


def test_a_recorded_step_computes_the_same_bits(model: Any) -> None:
    found = []
    for recording in (False, True):
        model.load_state_dict(tiny_models.build().state_dict())
        optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
        if recording:
            recorded(model, optimizer)
        else:
            for seed in range(2):
                train_step(model, optimizer, seed)
        found.append(tiny_models.weights(model))
    assert tiny_models.same_bits(*found)


def test_a_recording_that_an_error_ends_leaves_the_model_ready_for_the_next(
        model: Any, optimizer: megacompile.AdamW) -> None:
    def fail(node: Any) -> None:
        if op_of(node).name == "offload":
            raise OSError("broken")

    engine.probe(model, fail)
    recording = model.megacompile.record()
    with pytest.raises(LaneError, match="broken"), recording:
        train_step(model, optimizer)
    engine.probe(model, None)
    with pytest.raises(MegacompileError, match="an error ended it"):
        recording.timeline()
    assert recorded(model, optimizer).items


def test_cuda_timestamps_put_events_of_streams_and_moments_of_the_host_on_one_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=7.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(lanes, "time", clock)

    class Event:
        def record(self, stream: str) -> None:
            self.ms, self.stream = 1e3 * (clock.now - 5), stream

        def synchronize(self) -> None: ...

    cupy = SimpleNamespace(cuda=SimpleNamespace(Event=Event, get_elapsed_time=lambda begin, end: end.ms - begin.ms))
    scale = CudaTimestamps(cupy, {Lane.COMPUTE: "stream 1", Lane.H2D: "stream 2"})
    stamps = []
    for lane in (Lane.H2D, Lane.CPU, Lane.COMPUTE, Lane.PACK):
        clock.now += 0.005
        stamps.append(scale.stamp(lane))
    assert stamps[0].stream == "stream 2" and stamps[2].stream == "stream 1"
    seconds = [0.0, *map(scale.seconds, stamps)]
    assert all(after - before == pytest.approx(0.005) for before, after in itertools.pairwise(seconds)), seconds


def test_what_cannot_be_recorded_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with model.megacompile.record() as empty, pytest.raises(MegacompileError, match="recorded already"), \
            model.megacompile.record():
        pass
    with pytest.raises(MegacompileError, match="no section ran"):
        empty.timeline()
    monkeypatch.setattr(engine.runner(model), "executor", ReferenceExecutor(engine.backend(model)))
    with pytest.raises(MegacompileError, match="reference=True"), model.megacompile.record():
        pass


def test_an_evaluation_is_not_simulated_and_only_its_rows_are_explained(model: Any) -> None:
    with torch.no_grad():
        model(input_ids=batch()["input_ids"])
    with pytest.raises(MegacompileError, match="pass a batch with labels"):
        model.megacompile.simulate(hardware="h200")
    (line,) = model.megacompile.explain(hardware="h200").splitlines()
    assert line.startswith("rows: ")
