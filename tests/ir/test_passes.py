"""Properties of every schedule, for any plan: counts that follow without listing nodes."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from megacompile.errors import MegacompileError, ProgramError
from megacompile.ir.ops import UPDATE_OPS
from megacompile.ir.placement import Placements
from megacompile.ir.plan import Plan, split
from megacompile.ir.program import (
    Builder,
    CallSpec,
    Lane,
    Program,
    Tile,
    argument,
    copy_section,
    find,
    lane_of,
    model_program,
    nodes,
    op_of,
    operands,
    uses,
)
from megacompile.passes import PIPELINE
from megacompile.passes.pipeline import Compiled, compile_program
from megacompile.verify.verifier import verify

LAYERS = ("layers.0", "layers.1", "layers.2", "layers.3")
EVERY_TILE = ("prologue", *LAYERS, "epilogue")

#: Plans of a model of four layers; the product of K, micro-batches and residency, and the odd ones.
PLANS: dict[str, dict[str, Any]] = {
    **{f"K = {k}, {len(mbs)} micro-batches, {'resident' if resident else 'streamed'}":
       {"checkpoint_interval": k, "weight_slots": max(2, k), "micro_batches": mbs, "resident": resident}
       for k in (1, 2, 4) for mbs in ((1,), (2, 2, 1)) for resident in ((), EVERY_TILE)},
    "K = 3": {"checkpoint_interval": 3, "weight_slots": 4},
    "slab pool": {"checkpoint_interval": 2, "weight_slots": 3, "pinned": False, "gradient_slabs": 1},
    "slab pool, resident": {"pinned": False, "resident": ("layers.2", "epilogue")},
    "tied": {"tied": True, "checkpoint_interval": 2, "weight_slots": 2},
    "residuals kept": {"saved_layers": 2, "checkpoint_interval": 2},
    "all residuals kept": {"saved_layers": 4},
    "frozen": {"frozen": ("prologue", "layers.1"), "checkpoint_interval": 2},
    "updated on the device": {"resident": ("prologue", "layers.0", "epilogue"), "resident_state": ("prologue", "layers.0")},
    "visiting the device": {"resident": ("prologue",), "resident_state": ("prologue",),
                            "visiting_state": ("layers.0", "layers.2", "epilogue")},
    "moments after all weights": {"deferred_moments": True, "resident": ("prologue", "layers.1"),
                                  "resident_state": ("prologue",), "visiting_state": ("layers.2",)},
    "all updated on the device": {"resident": EVERY_TILE, "resident_state": EVERY_TILE, "micro_batches": (1, 1)},
}

Schedules = Callable[..., Compiled]


def plan_of(options: dict[str, Any]) -> Plan:
    micro_batches = options.get("micro_batches", (1,))
    chosen = {k: v for k, v in options.items() if k not in ("micro_batches", "tied", "frozen")}
    return Plan.of(sum(micro_batches), 8, micro_batches, **chosen)


@pytest.fixture(params=PLANS)
def case(request: pytest.FixtureRequest, make_schedule: Schedules) -> tuple[Program, Plan]:
    return make_schedule(**PLANS[request.param]).program, plan_of(PLANS[request.param])


def is_boundary(program: Program, tile: str) -> bool:
    return any(tile in call.tiles for call in program.calls if call.role != "layer")


def occupied(graph: fx.Graph, kind: str, tiles: Collection[str]) -> Iterator[int]:
    """After each node, how many living values of a kind slots hold for these tiles."""
    alive: set[fx.Node] = set()
    for node in nodes(graph):
        if op_of(node).name == "release":
            alive -= set(operands(node, "value"))
        elif op_of(node).result == kind and argument(node, "into") and argument(node, "tile") in tiles:
            alive.add(node)
        yield len(alive)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_layers_never_occupy_more_slots_than_planned(case: tuple[Program, Plan]) -> None:
    program, plan = case
    limits = {"weights": plan.weight_slots, "reduced": plan.gradient_slots, "staging": plan.staging_slabs,
              "slab": plan.gradient_slabs}
    layers = [t for t in program.tiles if not is_boundary(program, t)]
    for graph in program.sections.values():
        for kind, limit in limits.items():
            stay = {"weights": plan.resident, "reduced": plan.resident_state}.get(kind, ())
            streamed = [t for t in layers if t not in stay]
            assert max(occupied(graph, kind, streamed), default=0) <= limit


def test_declared_slots_are_those_planned_and_as_large_as_their_tiles(case: tuple[Program, Plan]) -> None:
    program, plan = case
    families = Counter(slot.rstrip("0123456789") for slot in program.slots)
    assert families["W"] <= plan.weight_slots and families["G"] <= plan.gradient_slots
    assert families["R"] == len(plan.resident) - len(plan.resident_state)
    assert families["RW"] == families["RS"] == families["RG"] == len(plan.resident_state)
    largest: Counter[str] = Counter()
    for graph in program.sections.values():
        for node in nodes(graph):
            if (slot := argument(node, "into")) is not None:
                tile = program.tiles[argument(node, "tile")]
                size = {"weights": tile.weight_bytes, "staging": tile.weight_bytes, "state": tile.state_bytes,
                        "visiting": tile.state_bytes + 2 * tile.weight_bytes}.get(op_of(node).result or "", tile.gradient_bytes)
                largest[slot] = max(largest[slot], size)
    assert {name: slot.bytes for name, slot in program.slots.items()} == largest


def test_device_slots_do_not_grow_with_depth(make_schedule: Schedules) -> None:
    """Nor with micro-batches. (There are more host slabs, up to the planned number.)"""
    shallow, deep = (
        {name: slot.bytes for name, slot in program.slots.items() if name[0] in "WG"}
        for program in (make_schedule(layers=4, checkpoint_interval=2).program,
                        make_schedule(layers=9, checkpoint_interval=2, micro_batches=(1, 1)).program))
    assert shallow == deep
    assert set(shallow) == {"W0", "W1", "WB0", "G0", "G1", "GB0"}


def test_boundary_slots_are_as_large_as_the_boundary_needs_at_once(make_schedule: Schedules) -> None:
    """A tied embedding beside each call's own tile: the large ones share one slot, whichever call comes first."""
    names = ("prologue", "layers.0", "epilogue")
    tiles = {n: Tile(n, 1, size, size, True) for n, size in zip((*names, "tied"), (300, 200, 100, 9000), strict=True)}
    calls = [CallSpec(n, "layer" if n == "layers.0" else n, n, (n,) if n == "layers.0" else (n, "tied")) for n in names]
    program = compile_program(model_program(calls, tiles, 1, True), Plan(1, 8, (1,), weight_slots=1), PIPELINE).program
    sizes = {name: slot.bytes for name, slot in program.slots.items() if name.startswith("WB")}
    assert sizes == {"WB0": 9000, "WB1": 300}


def test_resident_copies_are_never_released(case: tuple[Program, Plan]) -> None:
    program, _ = case
    for graph in program.sections.values():
        for node in find(graph, "release"):
            (value,) = operands(node, "value")
            assert not str(argument(value, "into")).startswith("R"), f"{value.name} is released, but stays resident"


def test_the_release_of_a_resident_copy_is_refused(make_schedule: Schedules) -> None:
    program = make_schedule(resident=("layers.1",)).program
    graph = copy_section(program.section("load"))
    (copy,) = find(graph, "prefetch")
    Builder(graph).after(copy, "release", value=copy)
    with pytest.raises(ProgramError, match="resident"):
        verify(program.evolve(sections={**program.sections, "load": graph}))


# ---- work ------------------------------------------------------------------------------------------------------------

FORWARDS, BACKWARDS = ("forward", "forward_saving", "recompute_backward"), ("recompute_backward", "backward")


@pytest.mark.parametrize("backward", ["backward", "backward_accumulate"])
def test_each_layer_runs_forward_twice_and_backward_once(case: tuple[Program, Plan], backward: str) -> None:
    """Once where its residuals are kept. Never three times, whatever K."""
    program, plan = case
    step = [*nodes(program.section("forward")), *nodes(program.section(backward))]
    runs = Counter((argument(n, "call"), argument(n, "mb")) for n in step if op_of(n).name in FORWARDS)
    backs = Counter((argument(n, "call"), argument(n, "mb")) for n in step if op_of(n).name in BACKWARDS)
    kept = LAYERS[len(LAYERS) - plan.saved_layers:]
    for mb in range(len(plan.micro_batches)):
        for layer in LAYERS:
            assert runs[layer, mb] == (1 if layer in kept else 2)
            assert backs[layer, mb] == 1
    losses = list(find(program.section("forward"), "loss"))
    assert [argument(n, "mb") for n in losses] == list(range(len(plan.micro_batches)))


def test_only_the_input_of_each_block_is_kept_for_the_backward(make_schedule: Schedules) -> None:
    for interval, kept in {1: 4, 2: 2, 3: 2, 4: 1}.items():
        program = make_schedule(checkpoint_interval=interval, weight_slots=4, micro_batches=(1, 1, 1)).program
        forward = program.section("forward")
        activations = [n for n in find(forward, "lease") if op_of(operands(n, "value")[0]).name == "forward"]
        assert len(activations) == 3 * kept


def test_each_tile_arrives_once_for_all_micro_batches(case: tuple[Program, Plan]) -> None:
    """In a section, and never if it is resident."""
    program, plan = case
    for section in ("forward", "evaluate", "backward"):
        arrivals = Counter(argument(n, "tile") for n in find(program.section(section), "prefetch"))
        assert not set(arrivals) & set(plan.resident)
        for tile in LAYERS:
            assert arrivals[tile] == (tile not in plan.resident), f"{tile} in {section}"


def test_each_trainable_tile_is_offloaded_and_updated_once(case: tuple[Program, Plan]) -> None:
    program, plan = case
    trainable = {name: 1 for name, tile in program.tiles.items() if tile.trainable}
    there = dict.fromkeys(plan.resident_state, 1)
    for section, ops in {"update": ("update update_weights update_on_device update_visiting update_held",),
                         "backward": ("reduce", "offload"),
                         "backward_accumulate": ("reduce", "offload", "accumulate")}.items():
        for op in ops:
            assert Counter(argument(n, "tile") for n in find(program.section(section), *op.split())) == trainable, (section, op)
    for section, op in {"update": "update_on_device", "backward_accumulate": "fetch_gradients"}.items():
        assert Counter(argument(n, "tile") for n in find(program.section(section), op)) == there, (section, op)
    visiting = Counter(argument(n, "tile") for n in find(program.section("update"), "update_visiting"))
    assert visiting == dict.fromkeys(plan.visiting_state, 1)
    (clip,) = find(program.section("update"), "clip")
    assert set(argument(clip, "tiles")) == set(trainable)


def test_updates_come_in_the_order_in_which_the_forward_needs_them(case: tuple[Program, Plan]) -> None:
    program, _ = case
    order = list(dict.fromkeys(tile for call in program.calls for tile in call.tiles))
    updated = [argument(n, "tile") for n in find(program.section("update"), *UPDATE_OPS)]
    assert updated == [tile for tile in order if program.tiles[tile].trainable]


# ---- overlap ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize("section", ["forward", "backward"])
def test_layers_are_prefetched_as_early_as_slots_allow(make_schedule: Schedules, section: str, slots: int) -> None:
    """When a layer begins to compute, copies of the next `slots` - 1 have been issued, and of no more."""
    graph = make_schedule(layers=6, weight_slots=slots, micro_batches=(1, 1)).program.section(section)
    arrived: list[str] = []
    begun: list[str] = []
    for node in nodes(graph):
        if op_of(node).name == "prefetch" and argument(node, "tile").startswith("layers"):
            arrived.append(argument(node, "tile"))
        call = argument(node, "call")
        if argument(node, "template") is not None and call.startswith("layers") and call not in begun:
            begun.append(call)
            assert arrived == [*begun, *remaining(section, begun)[:slots - 1]]


def remaining(section: str, begun: list[str]) -> list[str]:
    layers = [f"layers.{i}" for i in range(6)]
    return (layers if section == "forward" else layers[::-1])[len(begun):]


def test_gradients_leave_before_the_next_layer_begins_its_backward(make_schedule: Schedules) -> None:
    graph = make_schedule(layers=6, micro_batches=(1, 1)).program.section("backward")
    order = ["epilogue", *(f"layers.{i}" for i in reversed(range(6))), "prologue"]
    sent = []
    for node in nodes(graph):
        if op_of(node).name == "offload":
            sent.append(argument(node, "tile"))
        elif argument(node, "template") is not None:
            assert sent == order[:order.index(argument(node, "call"))]
    assert sent == order


# ---- events ----------------------------------------------------------------------------------------------------------


def waits(graph: fx.Graph, waiting: Lane, awaited: Lane) -> int:
    """Waits of one lane for another, within the section."""
    return sum(lane_of(w) == waiting and op_of(e).name == "record" and lane_of(e) == awaited
               for w in find(graph, "wait") for e in operands(w, "event"))


@pytest.mark.parametrize("micro_batches", [(1,), (2, 2, 1)])
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_forward_has_one_wait_for_each_arrival_and_each_slot_taken_again(
        make_schedule: Schedules, slots: int, micro_batches: tuple[int, ...]) -> None:
    """However many micro-batches there are. The epilogue takes the prologue's slot."""
    forward = make_schedule(layers=6, weight_slots=slots, micro_batches=micro_batches).program.section("forward")
    assert waits(forward, Lane.COMPUTE, Lane.H2D) == 6 + 2
    # The boundary's slot is free again long before its next turn: a layer's wait, if there is one before it, covers it.
    assert waits(forward, Lane.H2D, Lane.COMPUTE) in (6 - slots, 6 - slots + 1)


def test_a_backward_has_one_wait_for_each_gradient_and_each_slot_taken_again(make_schedule: Schedules) -> None:
    backward = make_schedule(layers=6, gradient_slots=2, micro_batches=(1, 1, 1)).program.section("backward")
    assert waits(backward, Lane.D2H, Lane.COMPUTE) == 6 + 2
    # Layers take two slots six times; the prologue takes the epilogue's, which a layer's wait has covered.
    assert waits(backward, Lane.COMPUTE, Lane.D2H) == 6 - 2


def test_a_resident_forward_waits_for_nothing_within_it(make_schedule: Schedules) -> None:
    program = make_schedule(resident=EVERY_TILE).program
    awaited = [op_of(operands(w, "event")[0]).name for w in find(program.section("forward"), "wait")]
    assert awaited == ["enter"] * len(EVERY_TILE)  # of each tile's arrival, in `load` or after its update


def test_events_grow_by_as_many_with_each_layer(make_schedule: Schedules) -> None:
    def events(layers: int) -> Counter[tuple[str, str]]:
        program = make_schedule(layers=layers, micro_batches=(1, 1)).program
        return Counter((section, op_of(n).name) for section, graph in program.sections.items()
                       for n in find(graph, "wait", "record", "enter", "leave"))

    counts = [events(layers) for layers in (6, 7, 8)]
    assert counts[2] - counts[1] == counts[1] - counts[0]
    assert sum(counts[1].values()) > sum(counts[0].values())


def test_every_event_is_waited_for_or_handed_on(case: tuple[Program, Plan]) -> None:
    program, _ = case
    for graph in program.sections.values():
        for event in find(graph, "record", "enter"):
            assert uses(graph, event), f"{event.name} is of no use"


# ---- any plan --------------------------------------------------------------------------------------------------------


@st.composite
def models_and_plans(draw: st.DrawFn) -> tuple[Program, Plan]:
    """Models of up to six layers, some frozen, tied or not; every choice of a plan that can hold them."""
    depth = draw(st.integers(1, 6))
    layers = [f"layers.{i}" for i in range(depth)]
    tied = draw(st.booleans())
    names = ["prologue", *layers, "epilogue", *(["tied"] if tied else [])]
    frozen = draw(st.sets(st.sampled_from(names), max_size=3)) if draw(st.booleans()) else set()
    tiles = {n: Tile(n, 100, 200, 210, n not in frozen, 1000) for n in names}
    calls = [CallSpec(n, "layer" if n in layers else n, draw(st.sampled_from(["a", "b"])) if n in layers else n,
                      (n, *(["tied"] if tied and n not in layers else [])),
                      ("recompute_backward",) if n == "prologue" else ()) for n in ["prologue", *layers, "epilogue"]]
    interval = draw(st.integers(1, depth + 1))
    batch = draw(st.integers(1, 5))
    resident = tuple(sorted(draw(st.sets(st.sampled_from(names), max_size=3))))
    stateful = tuple(t for t in resident if t not in frozen and draw(st.booleans()))
    visiting = tuple(t for t in names if t not in frozen and t not in stateful and draw(st.integers(0, 3)) == 0)
    plan = Plan(
        batch, 8, split(batch, draw(st.integers(1, batch))), interval, draw(st.integers(0, depth)),
        weight_slots=max(min(interval, depth), draw(st.integers(1, 4))), gradient_slots=draw(st.integers(1, 3)),
        placements=Placements.named(resident, resident_state=stateful, visiting_state=visiting),
        deferred_moments=draw(st.booleans()),
        pinned=draw(st.booleans()),
        staging_slabs=draw(st.integers(1, 3)), gradient_slabs=draw(st.integers(1, 3)))
    return model_program(calls, tiles, batch, labels=True), plan


@settings(max_examples=60, derandomize=True)
@given(models_and_plans())
def test_any_plan_of_any_model_compiles_to_a_program_that_verifies(drawn: tuple[Program, Plan]) -> None:
    """The manager verifies each stage: it raises where a pass is at fault."""
    model, plan = drawn
    program = compile_program(model, plan, PIPELINE).program
    updated = Counter(argument(n, "tile") for n in find(program.section("update"), *UPDATE_OPS))
    assert updated == {name: 1 for name, tile in model.tiles.items() if tile.trainable}


def test_too_few_weight_slots_for_a_block_are_refused_with_the_number_needed(make_schedule: Schedules) -> None:
    with pytest.raises(MegacompileError, match=r"2 weight slots do not hold .* plan at least 3"):
        make_schedule(checkpoint_interval=3, weight_slots=2)


@pytest.mark.parametrize(("slabs", "expected"), [
    (4, ("epilogue", "layers.0", "layers.2", "layers.1", "layers.3", "prologue")),  # as planned
    (3, ("epilogue", "layers.2", "layers.0", "layers.1", "layers.3", "prologue")),
    (2, ("epilogue", "layers.2", "layers.1", "layers.0", "layers.3", "prologue")),
    (1, ("epilogue", "layers.3", "layers.2", "layers.1", "layers.0", "prologue"))])
def test_an_order_of_updates_on_arrival_is_followed_as_far_as_slabs_last(slabs: int, expected: tuple[str, ...],
                                                                         make_schedule: Schedules) -> None:
    """Layers arrive from the last to the first. One that has to wait for a slab lets the next one of those that hold one go."""
    order = ("epilogue", "layers.0", "layers.2", "layers.1", "layers.3", "prologue")
    program = make_schedule(update="arrival", update_order=order, gradient_slabs=slabs).program
    graph = program.section("backward")
    assert tuple(argument(node, "tile") for node in find(graph, "update")) == expected
    offloads = {argument(node, "tile"): node for node in find(graph, "offload")}
    assert all(operands(node, "slab") == (offloads[argument(node, "tile")],) for node in find(graph, "update"))
    assert sum(name.startswith("D") and not name.startswith("DB") for name in program.slots) == slabs
