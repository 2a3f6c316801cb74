"""A plan decides where values are and when they move, never what is computed: every plan gives the same bits, on late lanes
too. A schedule without one of its waits gives other bits, so the waits, and not luck, keep the bits the same."""
from __future__ import annotations

import dataclasses
import functools
import random
import time
from collections.abc import Iterator
from typing import Any

import engine
import pytest
import torch
from models import VOCABULARY, build
from other_lanes import OtherLanes
from torch import Tensor, fx

import megacompile
from megacompile import api
from megacompile.errors import LaneError
from megacompile.ir.program import Builder, Lane, argument, find, lane_of, op_of, operands, rebuild
from megacompile.planning.config import StreamConfig
from megacompile.planning.planner import Choice, Planner

STEPS, LAYERS = 5, 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: The shapes of a step's batch, by turns: their programs share slots, tiles and carried events.
SHAPES = ((5, 29), (4, 17))

Weights = dict[str, Tensor]


@functools.cache
def analysed(dtype: torch.dtype) -> Any:
    """Capturing takes seconds and depends on no option below."""
    return ANALYSE(build("qwen2").to(dtype), StreamConfig.of(device="cpu"), "cpu", None, None)


ANALYSE = api.analyse


@pytest.fixture(scope="module", autouse=True)
def exact_and_captured_once() -> Iterator[None]:
    """Deterministic kernels, which the property takes for granted."""
    patch = pytest.MonkeyPatch()
    patch.setattr(api, "analyse", lambda model, *_, **__: analysed(next(model.parameters()).dtype))
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    patch.undo()


def stream(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return megacompile.stream(build("qwen2").to(dtype), device="cpu", micro_batch_size=2, compile=False, **options)


def batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCABULARY, SHAPES[step % len(SHAPES)], generator=generator)
    return {"input_ids": ids, "labels": ids}


def train(model: Any, steps: int = STEPS) -> Weights:
    """Clipped AdamW steps; the third adds up two backwards, and an evaluation runs beside the fourth's update."""
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    for step in range(steps):
        model(**batch(step)).loss.backward()
        if step == 2:
            model(**batch(step + 100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            with torch.no_grad():
                model(**batch(step))
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def different(ours: Weights, theirs: Weights) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def trained(dtype: torch.dtype, steps: int = STEPS, **options: Any) -> Weights:
    model = stream(dtype, **options)
    try:
        return train(model, steps)
    finally:
        model.megacompile.close()


@functools.cache
def meaning(dtype: torch.dtype, steps: int = STEPS) -> Weights:
    """By the reference interpreter: one thread, in program order, NaN in slots that are released."""
    return trained(dtype, steps, checkpoint_interval=1, reference=True)


# ---- plans -----------------------------------------------------------------------------------------------------------

PLANS: dict[str, dict[str, Any]] = {
    "streamed, K = 1": {"checkpoint_interval": 1},
    "streamed, K = 2": {"checkpoint_interval": 2},
    "streamed, K = 3": {"checkpoint_interval": 3},
    "streamed, K = 4": {"checkpoint_interval": 4},
    "resident": {"resident": "all"},
    "resident, K = 4": {"resident": "all", "checkpoint_interval": 4},
    "two tiles resident": {"resident": ("model.layers.1", "epilogue"), "checkpoint_interval": 2},
    "everything resident, its state too": {"resident_state": "all"},
    "two tiles resident, the state of one": {"resident_state": ("model.layers.0",), "resident": ("epilogue",)},
    "the first tiles' state resident, K = 2": {"resident_state": ("prologue", "model.layers.0"), "checkpoint_interval": 2},
    "three tiles visit the device": {"visiting_state": ("prologue", "model.layers.1", "epilogue")},
    "a tile's state resident, all others visit": {"resident_state": ("model.layers.0",), "resident": ("model.layers.2",),
                                                  "visiting_state": "all"},
    "moments after all weights": {"deferred_moments": True},
    "moments after all weights, slab pool, K = 2": {"deferred_moments": True, "pinned_memory": "120KiB",
                                                    "checkpoint_interval": 2},
    "slab pool, a tile's state resident": {"pinned_memory": "120KiB", "resident_state": ("model.layers.1",)},
    "slab pool": {"pinned_memory": "120KiB"},
    "slab pool of one slab, K = 2": {"pinned_memory": "120KiB", "gradient_slabs": 1, "checkpoint_interval": 2},
    "slab pool, a tile resident": {"pinned_memory": "120KiB", "resident": ("model.layers.0",)},
    "two layers keep their residuals": {"saved_layers": 2},
    "all layers keep their residuals": {"saved_layers": 4},
    "one layer keeps its residuals, K = 2": {"saved_layers": 1, "checkpoint_interval": 2},
    "two layers keep attention's results": {"saved_layers": 2, "residuals": "attention"},
    "all layers keep attention's results": {"saved_layers": 4, "residuals": "attention"},
    "two layers keep attention's results, checkpoints on the host": {"host_checkpoints": True, "saved_layers": 2,
                                                                       "residuals": "attention"},
    "checkpoints on the host": {"host_checkpoints": True},
    "checkpoints on the host, K = 2": {"host_checkpoints": True, "checkpoint_interval": 2},
    "two checkpoints on the host, slab pool": {"host_checkpoints": 2, "pinned_memory": "120KiB"},
    "a checkpoint on the host, a layer keeps its residuals": {"host_checkpoints": 1, "saved_layers": 1},
    "one weight slot": {"weight_slots": 1},
    "five weight slots": {"weight_slots": 5},
    "one gradient slot": {"gradient_slots": 1},
    "four gradient slots": {"gradient_slots": 4},
}
BF16_PLANS = ("streamed, K = 1", "streamed, K = 4", "resident", "slab pool", "two layers keep their residuals",
              "everything resident, its state too", "the first tiles' state resident, K = 2", "checkpoints on the host",
              "a tile's state resident, all others visit", "moments after all weights")


@pytest.mark.sample(7)
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_gives_the_same_bits(plan: str) -> None:
    assert not different(trained(torch.float32, **PLANS[plan]), meaning(torch.float32))


@pytest.mark.nightly(held_by=(
    "tests/model/test_bits.py::test_every_plan_gives_the_same_bits",
    "tests/model/test_optimizer_in_backward.py::test_updates_on_arrival_in_the_loop_give_the_bits_of_an_unclipped_loop",
    "tests/model/test_sums.py::test_late_lanes_change_no_bit"))
@pytest.mark.parametrize("plan", BF16_PLANS)
def test_every_plan_gives_the_same_bits_in_bf16(plan: str) -> None:
    assert not different(trained(torch.bfloat16, **PLANS[plan]), meaning(torch.bfloat16))


SWITCHED = [("streamed, K = 1", "everything resident, its state too"),
            ("everything resident, its state too", "a tile's state resident, all others visit"),
            ("two tiles resident, the state of one", "moments after all weights"),
            ("three tiles visit the device", "the first tiles' state resident, K = 2")]


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plans", SWITCHED, ids=" / ".join)
def test_batches_by_turns_whose_plans_keep_other_tiles_on_the_device_give_the_same_bits(
        plans: tuple[str, str], dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between them, state that is newer on the device comes to the host, and other state goes there."""
    options = {length: PLANS[plan] for (_, length), plan in zip(SHAPES, plans, strict=True)}
    choose, asked = Planner.choose, set()

    def choose_by_length(planner: Planner, batch: int, length: int, *rest: Any) -> Choice:
        other = dataclasses.replace(planner, config=dataclasses.replace(planner.config, **options[length]), stateful=None)
        found = choose(other, batch, length, *rest)
        asked.add(found.plan.resident_state)
        return dataclasses.replace(found, stateful=None)

    monkeypatch.setattr(Planner, "choose", choose_by_length)
    assert not different(trained(DTYPES[dtype]), meaning(DTYPES[dtype]))
    assert len(asked) == 2


@pytest.mark.sample(2)
@pytest.mark.parametrize("plan", ["streamed, K = 2", "resident", "slab pool of one slab, K = 2",
                                  "two layers keep their residuals", "the first tiles' state resident, K = 2",
                                  "checkpoints on the host", "checkpoints on the host, K = 2"])
def test_no_plan_reads_what_it_has_released(plan: str) -> None:
    """The reference interpreter fills what is released with NaN."""
    assert not different(trained(torch.float32, reference=True, **PLANS[plan]), meaning(torch.float32))


def test_what_is_released_too_early_is_poisoned() -> None:
    """Else the test above could not fail. A resident copy whose life is ended by hand: its next reader finds NaN."""
    model = stream(reference=True, resident="all")
    executable = model.megacompile.compiled(batch(0))

    def visit(node: fx.Node, arguments: dict[str, Any], build: Builder) -> fx.Node:
        made = build.add(op_of(node).name, node.name, **arguments)
        if op_of(node).name == "prefetch":
            build.add("release", value=made)
        return made

    edit(executable, "load", visit)
    assert model(**batch(0)).loss.isnan()
    model.megacompile.close()


def test_training_again_from_the_same_weights_gives_the_same_bits() -> None:
    """Nothing of the first training is left: no moments in a new optimizer, no stale copies, no gradients."""
    model = stream(resident=("model.layers.1",))
    initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = train(model)
    model.load_state_dict(initial)
    try:
        assert not different(train(model), first)
    finally:
        model.megacompile.close()


# ---- late lanes ------------------------------------------------------------------------------------------------------

LATE_PLANS = ("streamed, K = 1", "streamed, K = 2", "two tiles resident", "slab pool of one slab, K = 2",
              "two layers keep their residuals", "the first tiles' state resident, K = 2", "checkpoints on the host",
              "checkpoints on the host, K = 2")


@pytest.fixture(scope="module")
def late_models() -> Iterator[dict[str, tuple[Any, Weights]]]:
    """A streamed model per plan, with its initial weights: seeds share it."""
    models = {plan: stream(**PLANS[plan]) for plan in LATE_PLANS}
    yield {plan: (model, {n: t.clone() for n, t in model.state_dict().items()}) for plan, model in models.items()}
    for model in models.values():
        model.megacompile.close()


def stragglers(seed: int) -> Any:
    """Delays a race needs: one lane much later than the others (another for each seed), and all late at times."""
    draw = random.Random(seed)
    straggler = draw.choice(list(Lane))

    def delay(lane: Lane) -> None:
        likely, longest_s = (0.3, 2e-3) if lane == straggler else (0.03, 1e-3)
        if draw.random() < likely:
            time.sleep(draw.random() * longest_s)

    return delay


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", [*range(len(LATE_PLANS)), *(
    pytest.param(seed, marks=pytest.mark.nightly) for seed in range(len(LATE_PLANS), 5 * len(LATE_PLANS)))])
def test_late_lanes_change_no_bit(seed: int, late_models: dict[str, tuple[Any, Weights]]) -> None:
    model, initial = late_models[LATE_PLANS[seed % len(LATE_PLANS)]]
    model.load_state_dict(initial)
    engine.delay(model, stragglers(seed))
    try:
        assert not different(train(model), meaning(torch.float32))
    finally:
        engine.delay(model, None)


@pytest.mark.nightly(held_by=(
    "tests/model/test_bits.py::test_late_lanes_change_no_bit",
    "tests/model/test_optimizer_in_backward.py::test_updates_on_arrival_in_the_loop_give_the_bits_of_an_unclipped_loop",
    "tests/model/test_sums.py::test_late_lanes_change_no_bit"))
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 5))])
def test_late_lanes_change_no_bit_in_bf16(seed: int) -> None:
    model = stream(torch.bfloat16, checkpoint_interval=2)
    engine.delay(model, stragglers(seed))
    try:
        assert not different(train(model), meaning(torch.bfloat16))
    finally:
        model.megacompile.close()


# ---- without a wait --------------------------------------------------------------------------------------------------

#: A wait by what it is between: plan, section, lane and op that wait, op that is waited for (an `update` may be one of an
#: earlier section, which `enter` stands for).
WAITS = {
    "Weights-Ready": ("streamed, K = 1", "forward", Lane.COMPUTE, "forward", "prefetch"),
    "Buffer-Free": ("streamed, K = 1", "forward", Lane.H2D, "prefetch", "forward"),
    "Weights-Ready in a block": ("streamed, K = 2", "backward", Lane.COMPUTE, "forward_saving", "prefetch"),
    "Buffer-Free in a backward": ("streamed, K = 1", "backward", Lane.H2D, "prefetch", "recompute_backward"),
    "Backward-Done": ("streamed, K = 1", "backward", Lane.D2H, "offload", "reduce"),
    "a gradient slot is free": ("one gradient slot", "backward", Lane.COMPUTE, "reduce", "offload"),
    "weights are packed": ("slab pool", "forward", Lane.H2D, "prefetch", "pack"),
    "a staging slab is free": ("slab pool", "forward", Lane.PACK, "pack", "prefetch"),
    "gradients are in the slab": ("slab pool", "backward", Lane.CPU, "accumulate", "offload"),
    "a gradient slab is free": ("slab pool of one slab, K = 2", "backward", Lane.D2H, "offload", "accumulate"),
    "weights are updated": ("streamed, K = 1", "forward", Lane.H2D, "prefetch", "update"),
    "weights are updated, slab pool": ("slab pool", "forward", Lane.PACK, "pack", "update"),
    "a resident copy is updated": ("resident", "update", Lane.H2D, "prefetch", "update"),
    "a checkpoint is made": ("checkpoints on the host", "forward", Lane.D2H, "stash", "forward"),
    "a checkpoint has left": ("checkpoints on the host", "forward", Lane.COMPUTE, "release", "stash"),
    "a checkpoint is back": ("checkpoints on the host", "backward", Lane.COMPUTE, "recompute_backward", "fetch"),
    "a checkpoint's slot is free": ("checkpoints on the host", "backward", Lane.H2D, "fetch", "recompute_backward"),
    "the clip is known": ("the first tiles' state resident, K = 2", "update", Lane.COMPUTE, "update_on_device", "clip"),
    "weights are updated on the device": (
        "the first tiles' state resident, K = 2", "update", Lane.D2H, "offload_weights", "update_on_device"),
}


def waits_of(graph: fx.Graph, lane: Lane, op: str, awaited: str) -> Iterator[tuple[fx.Node, str]]:
    """Each such wait, with the name of the node that it is for, or the tile, of an earlier section's."""
    for wait in find(graph, "wait"):
        node = wait
        while op_of(node).name == "wait":  # the waits of one node stand right before it
            node = node.next
        (event,) = operands(wait, "event")
        if lane_of(wait) != lane or op_of(node).name != op:
            continue
        if op_of(event).name == "enter":
            part, _, tile = argument(event, "place").partition("/")
            if (awaited, part, argument(event, "lane")) == ("update", "weights", Lane.CPU):
                yield wait, tile
        elif op_of(operands(event, "node")[0]).name == awaited:
            yield wait, operands(event, "node")[0].name


def edit(executable: Any, section: str, visit: Any) -> None:
    """Runs another section in place of the compiled one. Nothing verifies it."""
    program = executable.program
    graph = rebuild(program.section(section), visit)
    executable.compiled.stages[program.stage] = program.evolve(sections={**program.sections, section: graph})


#: Tests also show that lateness alone does no harm to these: in each section, and on lanes of either side.
CONTROLS = ("Weights-Ready", "Backward-Done", "gradients are in the slab", "a resident copy is updated")


@pytest.mark.sample(5)
@pytest.mark.parametrize(("wait", "removed"), [*((wait, True) for wait in WAITS), *((wait, False) for wait in CONTROLS)])
def test_late_work_changes_the_weights_only_without_its_wait(
        wait: str, removed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The awaited work is late: it begins when nothing else can continue. With the wait the bits are those of program order;
    without it they are others, or the reader finds nothing to read."""
    plan, section, lane, op, awaited = WAITS[wait]
    model = stream(**PLANS[plan])
    executable = model.megacompile.compiled(batch(0))
    victim, late = list(waits_of(executable.program.section(section), lane, op, awaited))[-1]
    if removed:
        edit(executable, section, lambda node, arguments, build: None if node is victim else build.add(
            op_of(node).name, node.name, **arguments))
    graph, others = executable.program.section(section), OtherLanes(engine.executor(model), monkeypatch)

    def delay(node: fx.Node) -> None:
        here = node.graph is graph and node.name == late
        if op_of(node).name == awaited and (here or argument(node, "tile") == late):
            held = lane_of(node)
            assert held is not None
            others.hold(held)

    engine.probe(model, delay)
    steps = 3  # the first shape comes twice
    try:
        harmed = bool(different(train(model, steps), meaning(torch.float32, steps)))
    except LaneError:
        harmed = True
    finally:
        engine.probe(model, None)
        model.megacompile.close()
    assert harmed == removed and not others.timed_out
