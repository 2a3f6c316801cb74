"""The simulator: exact times of small programs, and what must hold of every program."""
from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torch import fx

from megacompile.ir.program import Access, Builder, Lane, Program, Tile, accesses, nodes, op_of
from megacompile.passes.pipeline import Compiled
from megacompile.predict.simulate import Item, Timeline, alone, run_lanes, simulate, step_of

Schedules = Callable[..., Compiled]

#: Seconds of each op, where a test does not say otherwise. Powers of two: sums are exact.
SECONDS = {"prefetch": 1.0, "forward": 4.0, "forward_saving": 4.0, "loss": 8.0, "recompute_backward": 8.0, "backward": 8.0,
           "reduce": 0.5, "offload": 1.0, "update": 2.0, "accumulate": 0.25, "pack": 0.25, "zeros": 0.125, "scale": 0.125}


def seconds(**changes: float) -> Callable[[fx.Node], float]:
    table = {**SECONDS, **changes}
    return lambda node: table.get(op_of(node).name, 0.0)


def section(write: Callable[[Builder], None], name: str = "forward") -> Program:
    """A program of one section. The simulator looks at lanes and events only, so that it need not make sense."""
    graph = fx.Graph()
    write(Builder(graph))
    return Program("synchronize", (1,), {"t": Tile("t", 1, 2, 2, True)}, (), {}, {name: graph})


def forward(build: Builder, name: str) -> fx.Node:
    return build.add("forward", name, template="decoder", call="layers.0", mb=0, inputs=())


def times(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {item.node.name: (item.start_s, item.end_s) for item in timeline.items if item.seconds > 0}


def run(program: Program, *, steps: int = 1, sections: tuple[str, ...] | None = ("forward",), **changes: float) -> Timeline:
    return simulate(program, seconds(**changes), sections=sections, steps=steps)


# ---- exact times ----------------------------------------------------------------------------------------------------

def test_lanes_run_beside_each_other_and_a_lane_runs_in_order() -> None:
    def write(build: Builder) -> None:
        forward(build, "h1")
        build.add("prefetch", "w1", tile="t")
        forward(build, "h2")

    assert times(run(section(write))) == {"h1": (0, 4), "w1": (0, 1), "h2": (4, 8)}


def test_a_wait_holds_its_lane_until_the_event_and_no_other_lane() -> None:
    def write(build: Builder) -> None:
        w1 = build.add("prefetch", "w1", tile="t")
        e1 = build.add("record", "e1", node=w1)
        build.add("prefetch", "w2", tile="t")
        build.add("wait", lane="compute", event=e1)
        h1 = forward(build, "h1")
        e2 = build.add("record", "e2", node=h1)
        build.add("wait", lane="h2d", event=e2)
        build.add("prefetch", "w3", tile="t")

    found = run(section(write))
    assert times(found) == {"w1": (0, 1), "w2": (1, 2), "h1": (1, 5), "w3": (5, 6)}
    assert found.steps_s == (5.0,)  # a step ends with its last computation
    assert (found.busy_s[Lane.COMPUTE], found.occupancy(Lane.COMPUTE)) == (4.0, 0.8)
    assert (found.critical_s[Lane.H2D], found.critical_s[Lane.COMPUTE]) == (1.0, 4.0)
    assert found.binds == Lane.COMPUTE


def test_an_event_covers_what_was_before_it_on_its_lane_and_not_what_came_after() -> None:
    def write(build: Builder) -> None:
        first = build.add("prefetch", "w1", tile="t")
        event = build.add("record", "e1", node=first)
        build.add("prefetch", "w2", tile="t")
        build.add("wait", lane="compute", event=event)
        forward(build, "h1")

    assert times(run(section(write)))["h1"] == (1, 5)


def test_sections_hand_events_on_by_place() -> None:
    """The second step's copy waits for the first one's update, and its computation does not wait for what is not there."""
    def write(build: Builder) -> None:
        e0 = build.add("enter", "e0", place="weights/t", access="write", lane="cpu")
        build.add("wait", lane="h2d", event=e0)
        w1 = build.add("prefetch", "w1", tile="t", into="W0")
        build.add("record", "e1", node=w1)
        a1 = build.add("update", "a1", tile="t", clip=w1)
        e2 = build.add("record", "e2", node=a1)
        build.add("leave", place="weights/t", access="write", event=e2)

    found = run(section(write), steps=2)
    assert [(i.node.name, i.start_s, i.end_s) for i in found.items if i.seconds] == [
        ("w1", 0, 1), ("a1", 0, 2), ("w1", 2, 3), ("a1", 2, 4)]


def test_lanes_that_slow_each_other_down_do_so_only_while_both_work() -> None:
    def write(build: Builder) -> None:
        build.add("prefetch", "w1", tile="t")
        reduced = build.add("zeros", "a1", tile="t")
        build.add("offload", "o1", tile="t", reduced=reduced)

    def halved(busy: frozenset[Lane]) -> Mapping[Lane, float]:
        return dict.fromkeys(busy, 0.5 if {Lane.H2D, Lane.D2H} <= busy else 1.0)

    found = simulate(section(write), seconds(prefetch=1.0, offload=3.0, zeros=0.0), halved, ("forward",), 1)
    # Both at half speed until the short one is done at 2; the long one has 2 of its 3 left, now at full speed.
    assert times(found) == {"w1": (0, 2), "o1": (0, 4)}


def test_lanes_that_wait_for_each_other_are_found() -> None:
    """Two sections cannot: their events come before their waits. A simulation of lanes that do fails instead of ending."""
    def write(build: Builder) -> None:
        build.add("prefetch", "w1", tile="t")
        forward(build, "h1")

    first, second = run(section(write)).items
    for item, other in ((first, second), (second, first)):
        item.after, item.done = [other], False
    with pytest.raises(AssertionError, match=r"lanes wait for each other forever: (w1, h1|h1, w1)"):
        run_lanes({first.lane: [first], second.lane: [second]}, alone)


def test_a_pipeline_of_copies_and_layers_is_bound_by_the_slower(make_schedule: Schedules) -> None:
    """Eight layers forward: by computation where that is longer, after one copy; by the link where copies are."""
    program = make_schedule(layers=8).program
    free = {"zeros": 0.0, "reduce": 0.0}
    computing = run(program, prefetch=1.0, forward=4.0, loss=4.0, **free)
    assert computing.step_s == 1 + 10 * 4
    assert computing.binds == Lane.COMPUTE
    copying = run(program, prefetch=4.0, forward=1.0, loss=1.0, **free)
    # Boundary tiles take turns in one slot: the epilogue's copy waits for the prologue's call, which is long over.
    assert copying.step_s == 10 * 4 + 1
    assert copying.binds == Lane.H2D


# ---- what holds of every program --------------------------------------------------------------------------------------

PLANS: list[dict[str, Any]] = [
    {}, {"micro_batches": (2, 2, 1)}, {"checkpoint_interval": 2, "weight_slots": 3}, {"weight_slots": 1},
    {"pinned": False, "gradient_slabs": 1}, {"resident": ("prologue", "layers.2")}, {"saved_layers": 2}, {"tied": True},
    {"whole_step": True, "micro_batches": (1, 1, 1, 1), "waves": 2, "saved_layers": 4, "gradient_slots": 4},
    {"whole_step": True, "micro_batches": (1, 1), "update": "arrival"},
    {"checkpoint_interval": 2, "micro_batches": (1, 1), "update": "arrival", "weight_slots": 3}]


@pytest.fixture(params=PLANS, ids=str)
def program(request: pytest.FixtureRequest, make_schedule: Schedules) -> Program:
    return make_schedule(**request.param).program


@pytest.fixture
def timeline(program: Program) -> Timeline:
    return simulate(program, seconds())


def test_each_instruction_of_each_step_runs_once_for_its_own_time(program: Program, timeline: Timeline) -> None:
    executed = [n for s in step_of(program) for n in nodes(program.section(s)) if SECONDS.get(op_of(n).name)]
    assert sorted((i.step, i.node.name) for i in timeline.items if i.seconds > 0) == sorted(
        (step, n.name) for step in range(3) for n in executed)
    assert all(item.end_s - item.start_s == item.seconds for item in timeline.items)


def test_a_lane_does_one_thing_at_a_time_in_program_order(program: Program, timeline: Timeline) -> None:
    order = {node: i for s in step_of(program) for i, node in enumerate(nodes(program.section(s)))}
    for lane in Lane:
        items = [item for item in timeline.items if item.lane == lane]
        place = [(item.step, step_of(program).index(item.section), order[item.node]) for item in items]
        assert place == sorted(place)
        assert all(before.end_s <= after.start_s for before, after in itertools.pairwise(items))


def test_conflicting_accesses_never_overlap(timeline: Timeline) -> None:
    """The simulated order is a legal one: what the events order, and no luck, keeps conflicting accesses apart."""
    touched: dict[str, list[tuple[Item, Access]]] = {}
    for item in timeline.items:
        if op_of(item.node).name not in ("wait", "release", "leased", "lease"):
            for place, access in accesses(item.node):
                # A value's own memory is another one in each run of a section.
                key = f"{place} {item.step} {item.section}" if place.startswith("%") else place
                touched.setdefault(key, []).append((item, access))
    compared = 0
    for place, found in touched.items():
        for i, (one, access) in enumerate(found):
            for other, its in found[i + 1:]:
                if one.lane != other.lane and Access.WRITE in (access, its):
                    compared += 1
                    assert one.end_s <= other.start_s or other.end_s <= one.start_s, f"{place}: {one.node}, {other.node}"
    assert compared


def test_the_critical_chain_adds_up_to_the_step(timeline: Timeline) -> None:
    assert sum(timeline.critical_s.values()) == pytest.approx(timeline.step_s)
    assert all(0 <= timeline.occupancy(lane) <= 1 for lane in Lane)


def test_a_step_takes_no_less_than_its_busiest_lane_and_no_more_than_all_of_them(timeline: Timeline) -> None:
    busy = [timeline.busy_s[lane] for lane in Lane]
    assert max(busy) <= timeline.step_s <= sum(busy)


def test_steps_are_steady_from_the_second_on(program: Program) -> None:
    a, b, c, d = simulate(program, seconds(), steps=4).steps_s
    assert c - b == d - c
    assert b - a >= c - b - 1e-9 or c - b >= a


def test_a_backward_returns_when_gradients_are_on_the_host(make_schedule: Schedules) -> None:
    """What is submitted after it begins no earlier, needed or not."""
    resident = ("prologue", "layers.0", "layers.1", "layers.2", "layers.3", "epilogue")
    found = run(make_schedule(resident=resident).program, steps=2, sections=None, offload=64.0)
    home = max(i.end_s for i in found.items if i.step == 0 and i.section == "backward")
    assert min(i.start_s for i in found.items if i.section == "update") == home
    assert min(i.start_s for i in found.items if i.step == 1) >= home


# ---- what plans are for -----------------------------------------------------------------------------------------------

def test_double_buffering_hides_copies(make_schedule: Schedules) -> None:
    single, double = (run(make_schedule(layers=8, weight_slots=n).program, steps=3, sections=None, prefetch=2.0)
                      for n in (1, 2))
    assert single.step_s >= double.step_s + 8 * 2.0  # each copy of the forward in the open, and more in the backward
    assert single.critical_s[Lane.H2D] > double.critical_s[Lane.H2D]


def test_an_update_overlaps_with_the_next_forward(make_schedule: Schedules) -> None:
    """All but the first tile's, where layers take longer than their updates; none of it costs more than it takes."""
    program = make_schedule(layers=8).program
    without = run(program, steps=3, sections=None, update=0.0).step_s
    with_updates = run(program, steps=3, sections=None, update=2.0).step_s
    assert without + 2.0 <= with_updates <= without + 2 * 2.0
    slow = run(program, steps=3, sections=None, update=64.0)
    assert slow.binds == Lane.CPU


@pytest.mark.parametrize("whole_step", [False, True])
def test_an_update_on_arrival_overlaps_with_the_backward(whole_step: bool, make_schedule: Schedules) -> None:
    """The update at the step's end overlaps with nothing, since the forward is short."""
    slow = {"update": 6.0, "forward": 1.0, "loss": 1.0}
    programs = [make_schedule(layers=8, whole_step=whole_step, update=update).program for update in ("step", "arrival")]
    at_end, on_arrival = (run(program, steps=3, sections=None, **slow) for program in programs)
    assert on_arrival.step_s < at_end.step_s - 8 * 2.0


def test_keeping_residuals_saves_their_recomputation(make_schedule: Schedules) -> None:
    lean = run(make_schedule(layers=8).program, steps=3, sections=None, recompute_backward=11.0)
    kept = run(make_schedule(layers=8, saved_layers=5).program, steps=3, sections=None, recompute_backward=11.0)
    assert lean.step_s - kept.step_s == 5 * 3.0


def test_contention_only_ever_slows(program: Program) -> None:
    def shared(busy: frozenset[Lane]) -> Mapping[Lane, float]:
        return {lane: 0.7 if lane != Lane.COMPUTE and len(busy) > 1 else 1.0 for lane in busy}

    free = simulate(program, seconds())
    assert simulate(program, seconds(), shared).step_s >= free.step_s


def test_the_table_names_every_lane_that_works(timeline: Timeline) -> None:
    text = timeline.table()
    assert f"step: {timeline.step_s:.3f} s" in text
    for lane in {str(item.lane) for item in timeline.items}:
        assert f"\n{lane} " in text


def test_durations_are_asked_for_executed_nodes_alone(program: Program) -> None:
    asked: list[str] = []

    def record(node: fx.Node) -> float:
        asked.append(op_of(node).name)
        return 1.0

    simulate(program, record, steps=1)
    assert asked and not {"wait", "record", "enter", "leave", "release", "resident"} & set(asked)
