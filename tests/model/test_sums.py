"""Waves whose gradients the host sums in FP32: the sums, their readers, the verifier's rule, and the planner."""
from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import engine
import pytest
import tiny_models
import torch
from tiny_models import batch

import megacompile
from megacompile.errors import InsufficientMemoryError, LaneError, MegacompileError, ProgramError, TornError
from megacompile.ir.placement import Placements, Updated
from megacompile.ir.plan import Plan
from megacompile.ir.program import Builder, Lane, argument, find, nodes, op_of, rebuild
from megacompile.planning.config import StreamConfig
from megacompile.planning.memory import host_parts
from megacompile.planning.planner import Planner
from megacompile.predict.hardware import Hardware
from megacompile.runtime.memory import store
from megacompile.runtime.memory.tiles import HostTile
from megacompile.runtime.optimizer.host_update import norm
from megacompile.sizes import parse_bytes
from megacompile.verify.verifier import verify
from megacompile.weights.tiling import HOST_MARGIN_BYTES

ROWS = 6
STEPS = 2


class Replanned:
    """A streamed model that tests share, planned anew: a capture takes seconds. State: its own options."""

    def __init__(self, shared: tiny_models.Shared) -> None:
        self.shared, self.own = shared, engine.config(shared.model)

    def plan(self, **options: Any) -> Any:
        """The model as it was made, with other options."""
        return self._under(StreamConfig.of(device="cpu", micro_batch_size=2, **options))

    def _under(self, config: StreamConfig) -> Any:
        model = self.shared.fresh()
        engine.of(model).evict()
        engine.captures(model).plan_with(config=config, pinned_bytes=parse_bytes(config.pinned_memory))
        engine.executables(model).stateful = None
        engine.executables(model).table.clear()
        engine.store(model).drop_sums()
        return model

    def restore(self) -> None:
        model = self._under(self.own)
        engine.optimizer_in_backward(model).attach(None)

    def trained(self, overlap: str | None = None, delay: Callable[[Lane], None] | None = None,
                **options: Any) -> dict[str, torch.Tensor]:
        """Weights after some whole steps."""
        model = self.plan(**options)
        engine.delay(model, delay)
        optimizer = optimizer_of(model, overlap=overlap, max_grad_norm=None if overlap else 1.0)
        for seed in range(STEPS):
            model.megacompile.train_step(batch(seed, rows=ROWS), optimizer)
        return tiny_models.weights(model)


@pytest.fixture
def fp32(_shared_fp32: tiny_models.Shared) -> Iterator[Replanned]:
    made = Replanned(_shared_fp32)
    yield made
    made.restore()


@pytest.fixture
def bf16(_shared_bf16: tiny_models.Shared) -> Iterator[Replanned]:
    made = Replanned(_shared_bf16)
    yield made
    made.restore()


def optimizer_of(model: Any, **options: Any) -> megacompile.AdamW:
    return megacompile.AdamW(model.parameters(), lr=1e-2, eps=1e-4, **{"max_grad_norm": 1.0, **options})


def sums(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter's sum, of tiles that have one."""
    for tile in engine.tiles(model).values():
        if tile.sums is not None:
            yield from ((s.name, view) for s, view in zip(tile.layout.slices, tile.layout.views(tile.sums), strict=True))


# ---- the sums --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("options", [
    {"waves": 2}, {"waves": 3, "checkpoint_interval": 2, "pinned_memory": "32KiB"},
    {"waves": 2, "host_checkpoints": True, "resident": ("prologue",)}], ids=str)
def test_sums_are_the_gradients_of_native_autograd(options: dict[str, Any], fp32: Replanned) -> None:
    native, model = tiny_models.build(), fp32.plan(host_sums="all", **options)
    native(**batch(0, rows=ROWS)).loss.backward()
    optimizer = optimizer_of(model)
    model.megacompile.train_step(batch(0, rows=ROWS), optimizer)
    model.megacompile.synchronize()
    theirs = {name: parameter.grad for name, parameter in native.named_parameters()}
    found = dict(sums(model))
    assert found.keys() == theirs.keys()
    expected = torch.nn.utils.get_total_norm(list(theirs.values()))
    for name, total in found.items():  # a key's bias has no gradient but what rounding leaves
        assert (total - theirs[name]).norm() <= 1e-5 * theirs[name].norm() + 1e-8 * expected, name
    assert optimizer.grad_norm == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("overlap", [None, "backward"])
@pytest.mark.parametrize("options", [
    {"host_sums": "all"}, {"host_sums": ("prologue", "model.layers.1"), "resident_state": ("model.layers.0",)},
    {"host_sums": "all", "pinned_memory": "32KiB", "resident": ("model.layers.2",)}], ids=str)
def test_in_fp32_a_wave_of_one_micro_batch_gives_the_bits_of_accumulators_on_the_device(
        options: dict[str, Any], overlap: str | None, fp32: Replanned) -> None:
    assert tiny_models.same_bits(fp32.trained(overlap, waves=3, **options), fp32.trained(overlap, waves=3))


def test_in_bf16_what_arrives_is_added_in_fp32_and_the_clip_reads_norms_of_the_sums(bf16: Replanned) -> None:
    model = bf16.plan(waves=3, host_sums="all")
    arrived: dict[str, list[torch.Tensor]] = {}

    def probe(node: Any) -> None:
        if op_of(node).name == "add_to_sum":
            tile = engine.store(model)[argument(node, "tile")]
            arrived.setdefault(tile.layout.name, []).append(tile.layout.flat(tile.gradients).clone())

    optimizer = optimizer_of(model)
    engine.probe(model, probe)
    model.megacompile.train_step(batch(0, rows=ROWS), optimizer)
    model.megacompile.synchronize()
    squares = 0.0
    for name, waves in arrived.items():
        tile: HostTile = engine.store(model)[name]
        assert len(waves) == 3 and all(wave.dtype == torch.bfloat16 for wave in waves) and tile.sums is not None
        assert torch.equal(tile.sums, waves[0].float() + waves[1].float() + waves[2].float())
        # Norms are kept in FP32.
        squares += sum(float(torch.tensor(norm(tile.sums[s.start:s.stop]))) ** 2 for s in tile.layout.slices)
    assert len(arrived) == len(engine.tiles(model))
    assert optimizer.grad_norm == pytest.approx(squares ** 0.5, rel=1e-12)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("overlap", "options"), [(None, {}), (None, {"pinned_memory": "32KiB", "gradient_slabs": 1}),
                                                  ("backward", {"checkpoint_interval": 2})], ids=str)
def test_late_lanes_change_no_bit(overlap: str | None, options: dict[str, Any], bf16: Replanned) -> None:
    expected = bf16.trained(overlap, waves=2, host_sums="all", **options)
    for straggler in (Lane.CPU, Lane.D2H, Lane.COMPUTE):
        draw = random.Random(str(straggler))

        def delay(lane: Lane, draw: random.Random = draw, straggler: Lane = straggler) -> None:
            if draw.random() < (0.3 if lane == straggler else 0.03):
                time.sleep(draw.random() * 2e-3)

        assert tiny_models.same_bits(bf16.trained(overlap, delay, waves=2, host_sums="all", **options), expected)


def test_an_update_that_stops_half_way_is_completed_from_the_sums(fp32: Replanned) -> None:
    expected = fp32.trained(waves=2, host_sums="all")
    model = fp32.plan(waves=2, host_sums="all")
    optimizer, seen = optimizer_of(model), []

    def probe(node: Any) -> None:
        if op_of(node).name == "update_from_sum":
            seen.append(node)
            if len(seen) == 3:
                raise RuntimeError("power cut")

    def step(seed: int) -> None:
        model.megacompile.train_step(batch(seed, rows=ROWS), optimizer)
        model.megacompile.synchronize()

    engine.probe(model, probe)
    with pytest.raises(LaneError, match="power cut"):
        step(0)
    with pytest.raises(TornError):
        step(1)
    optimizer.step()
    for seed in range(1, STEPS):
        step(seed)
    assert tiny_models.same_bits(tiny_models.weights(model), expected)


@pytest.mark.parametrize("op", ["add_to_sum", "norms_of_sum"])
def test_a_sum_that_fails_leaves_the_step_undone(op: str, fp32: Replanned) -> None:
    expected = fp32.trained(waves=2, host_sums="all")
    model = fp32.plan(waves=2, host_sums="all")
    optimizer = optimizer_of(model)
    before = tiny_models.weights(model)

    def probe(node: Any) -> None:
        if op_of(node).name == op:
            engine.probe(model, None)
            raise RuntimeError("power cut")

    engine.probe(model, probe)
    with pytest.raises(LaneError, match="power cut"):
        model.megacompile.train_step(batch(0, rows=ROWS), optimizer)
    assert tiny_models.same_bits(tiny_models.weights(model), before)
    for seed in range(STEPS):
        model.megacompile.train_step(batch(seed, rows=ROWS), optimizer)
    assert tiny_models.same_bits(tiny_models.weights(model), expected)


@pytest.mark.nightly(held_by=(
    "tests/model/test_sums.py::test_sums_that_do_not_fit_the_host_are_refused_before_anything_runs",
    "tests/model/test_sums.py::test_no_plan_takes_more_of_the_host_than_there_is"))
def test_sums_are_counted(fp32: Replanned) -> None:
    model = fp32.plan(waves=2, host_sums=("model.layers.1",))
    handle = model.megacompile
    tile = engine.store(model)["model.layers.1"]
    optimizer = optimizer_of(model)
    before = handle.stats["host_bytes"]
    handle.train_step(batch(0, rows=ROWS), optimizer)
    assert handle.stats["host_parts"]["sums"] == 4 * tile.layout.elements == handle.stats["host_bytes"] - before
    assert "\nsums " in handle.explain(hardware="h200")


def test_sums_that_do_not_fit_the_host_are_refused_before_anything_runs(
        fp32: Replanned, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fp32.plan(waves=2, host_sums="all")
    before = tiny_models.weights(model)
    monkeypatch.setattr(store, "available_host_bytes", lambda: 100)
    with pytest.raises(InsufficientMemoryError, match="sums of gradients over waves take"):
        model.megacompile.train_step(batch(0, rows=ROWS), optimizer_of(model))
    assert tiny_models.same_bits(tiny_models.weights(model), before)


# ---- programs --------------------------------------------------------------------------------------------------------

Schedules = Callable[..., Any]
WAVES: dict[str, Any] = {"layers": 2, "micro_batches": (1, 1), "waves": 2, "whole_step": True,
                         "host_sums": ("layers.1", "epilogue")}


@pytest.mark.sample(1)
@pytest.mark.parametrize("changes", [{}, {"pinned": False, "gradient_slabs": 1}, {"update": "arrival"}], ids=str)
def test_every_removed_wait_is_caught(changes: dict[str, Any], make_schedule: Schedules) -> None:
    program = make_schedule(**WAVES | changes).program
    for name, graph in program.sections.items():
        for victim in list(find(graph, "wait")):
            def visit(node: Any, arguments: dict[str, Any], build: Builder, victim: Any = victim) -> Any:
                return None if node is victim else build.add(op_of(node).name, node.name, **arguments)
            with pytest.raises(ProgramError):
                verify(program.evolve(sections={**program.sections, name: rebuild(graph, visit)}))


def test_each_wave_is_offloaded_once_and_its_accumulators_are_released(make_schedule: Schedules) -> None:
    graph = make_schedule(**WAVES).program.section("train_step")
    for tile, waves in {"layers.1": 2, "epilogue": 2, "layers.0": 1, "prologue": 1}.items():
        of_tile = [op_of(n).name for n in nodes(graph) if argument(n, "tile") == tile]
        ops = [op for op in of_tile if op not in ("prefetch", "zeros")]
        added = ["add_to_sum"] if waves == 2 else []
        assert ops == ["reduce", "offload", *added] * waves + ["norms_of_sum"] * (waves == 2), tile
    losses = list(find(graph, "loss"))
    between = [n for n in find(graph, "zeros", "reduce") if argument(n, "tile") == "layers.1" and losses[0] < n < losses[1]]
    assert [op_of(n).name for n in between] == ["zeros", "reduce"], "nothing of the tile lives on the device between waves"


@pytest.mark.sample(1)
@pytest.mark.parametrize("processes", [{"ranks": 2}, {"hosts": 2}, {"ranks": 2, "hosts": 2}], ids=str)
@pytest.mark.parametrize("resident", [False, True])
def test_any_tiles_of_several_ranks_may_be_added_up_on_the_host(resident: bool, processes: dict[str, int],
                                                                make_schedule: Schedules) -> None:
    """The other tiles have one accumulator for all waves, so the last contribution of a wave may be that of any tile."""
    tiles = ("prologue", "layers.0", "layers.1", "epilogue")
    for count in range(1, len(tiles) + 1):
        for summed in itertools.combinations(tiles, count):
            others = tuple(tile for tile in tiles if tile not in summed)
            graph = make_schedule(
                layers=2, whole_step=True, micro_batches=(1, 1), waves=2, host_sums=summed, **processes,
                **{"resident": others, "resident_state": others} if resident else {}).program.section("train_step")
            assert [argument(node, "tile") for node in find(graph, "norms_of_sum")].count("epilogue") == ("epilogue" in summed)


def test_a_plan_that_adds_up_waves_on_the_host_and_has_one_is_refused() -> None:
    with pytest.raises(MegacompileError, match="between waves, and there is one wave"):
        Plan(2, 8, (1, 1), placements=Placements.named(host_sums=("a",)))


def test_an_edit_that_adds_up_other_tiles_than_its_plan_is_refused(fp32: Replanned) -> None:
    handle = fp32.plan(waves=3, host_sums=("model.layers.1",)).megacompile
    text = handle.text(batch(0, rows=ROWS), whole_step=True)
    handle.load_program(text)
    for new, message in (('host_sums=("model.layers.1", "model.layers.2")', "add up gradients of different tiles on the host"),
                         ('host_sums=("model.layers.9",)', "adds up gradients of model.layers.9 on the host")):
        with pytest.raises(ProgramError, match=message):
            handle.load_program(text.replace('host_sums=("model.layers.1",)', new))


# ---- plans -----------------------------------------------------------------------------------------------------------

LENGTH, DEPTH = 64, 3
LARGE = {"vocab_size": 100, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 4, "num_attention_heads": 32,
         "num_key_value_heads": 8}


@pytest.fixture
def analysis(_shared_fp32: tiny_models.Shared) -> Any:
    """A captured model of three layers and its tiling."""
    return engine.captured(_shared_fp32.model), engine.tiling(_shared_fp32.model)


def planner(analysis: Any, budget: int = 1 << 40, **more: Any) -> Planner:
    fields = {name: more.pop(name) for name in ("host_bytes", "keep_residuals") if name in more}
    options = {"device": "cpu", "micro_batch_size": 1, "checkpoint_interval": 1, **more}
    return Planner(*analysis, StreamConfig.of(**options), budget, margin_bytes=0, **fields)


def test_as_many_accumulators_stay_on_the_device_as_fit(analysis: Any) -> None:
    """And no fewer tiles are added up on the host than must be. (Sequences so short that accumulators are most of it.)"""
    roomy = planner(analysis, waves=4, saved_layers=0).plan_step(4, 8, "step")
    assert roomy.waves == 4 and not roomy.host_sums
    need = planner(analysis).estimate(roomy).total
    counts = []
    for budget in range(need - 1, need // 3, -need // 60):
        tight = planner(analysis, budget, waves=4, saved_layers=0, host_checkpoints=False)
        try:
            plan = tight.plan_step(4, 8, "step")
        except InsufficientMemoryError:
            break
        assert tight.fits(plan) and plan.host_sums
        assert not tight.fits(plan.placed(Updated.FROM_HOST_SUMS, plan.host_sums[:-1])), "one tile more could have stayed"
        counts.append(len(plan.host_sums))
    assert counts == sorted(counts) and counts[-1] > counts[0]


def test_waves_whose_accumulators_do_not_fit_keep_more_residuals_with_sums_on_the_host(analysis: Any) -> None:
    whole = planner(analysis, waves=4).plan_step(32, LENGTH, "step")
    assert whole.saved_layers == DEPTH and not whole.host_sums
    lean = planner(analysis, waves=4, host_sums="all")
    budget = lean.estimate(whole.placed(Updated.FROM_HOST_SUMS, lean._sums())).total
    found = planner(analysis, budget, waves=4).step_plans(32, LENGTH, "step")
    best = max(found, key=lambda plan: plan.saved_layers)
    assert best.saved_layers == DEPTH and best.host_sums
    assert max((plan.saved_layers for plan in found if not plan.host_sums), default=0) < DEPTH


def test_no_plan_takes_more_of_the_host_than_there_is(analysis: Any) -> None:
    captured, tiling = analysis
    whole = planner(analysis, waves=4).plan_step(32, LENGTH, "step")
    tight = planner(analysis, waves=4, host_sums="all")
    budget = tight.estimate(whole.placed(Updated.FROM_HOST_SUMS, tight._sums())).total
    tiles = tiling.host_bytes() + HOST_MARGIN_BYTES
    layer = tiling.layouts["model.layers.0"].sum_bytes
    summed = []
    for layers in (0, 1, 3, 100):
        room = planner(analysis, budget, waves=4, host_bytes=tiles + layers * layer)
        assert room.host_bytes_left == layers * layer + tiling.host_parts()["gradients"]
        plans = room.step_plans(32, LENGTH, "step")
        assert all(sum(host_parts(captured, tiling, plan).values()) <= room.host_bytes_left for plan in plans)
        summed.append(max(len(plan.host_sums) for plan in plans))
    assert summed == sorted(summed) and summed[0] == 0 < summed[-1]


def test_checkpoints_that_the_host_has_no_room_for_are_refused(analysis: Any) -> None:
    tiles = analysis[1].host_bytes() + HOST_MARGIN_BYTES
    def plan(budget: int = 1 << 40, **options: Any) -> Plan:
        return planner(analysis, budget, saved_layers=0, **options).plan(64, LENGTH)

    few, most = (planner(analysis).estimate(plan(host_checkpoints=count)).total for count in (True, False))
    assert plan(few).host_checkpoints == DEPTH - 1
    with pytest.raises(InsufficientMemoryError, match=r"needs 512\.00 KiB of checkpoints and (34\.65 KiB) of gradients in "
                       r"host memory, and \1 are left after weights and optimizer state: use fewer or shorter sequences"):
        plan(few, host_bytes=tiles)
    assert not plan(most, host_bytes=tiles).host_checkpoints


def test_a_step_whose_checkpoints_fit_only_in_parts_runs_in_waves(analysis: Any) -> None:
    tiles = analysis[1].host_bytes() + HOST_MARGIN_BYTES
    need = planner(analysis).estimate(planner(analysis, waves=4, saved_layers=0).plan_step(64, LENGTH, "step")).total
    tight = planner(analysis, need, host_bytes=tiles)
    with pytest.raises(InsufficientMemoryError, match="a batch of 64 x"):
        tight.plan(64, LENGTH)
    plan = tight.plan_step(64, LENGTH, "step")
    assert tight.fits(plan) and plan.waves == 4 and sum(plan.micro_batches) == 64
    with pytest.raises(InsufficientMemoryError, match="a batch of 64 x"):
        planner(analysis, need // 3, host_bytes=tiles).plan_step(64, LENGTH, "step")


@pytest.mark.nightly(
    held_by="tests/model/test_sums.py::test_waves_whose_accumulators_do_not_fit_keep_more_residuals_with_sums_on_the_host")
def test_where_the_update_is_fast_a_step_is_planned_with_sums_on_the_host() -> None:
    """Searched by simulation; and not where the host has no room."""
    with torch.device("meta"):
        model = tiny_models.build(True, **LARGE)
    fast_host = replace(Hardware.find("h200"), adam=1e12, host_copy=1e12)
    found = megacompile.schedule(model, batch=16, length=2048, whole_step=True, hardware=fast_host, resident_state=(),
                                 micro_batch_size=4, device_memory="12GiB", host_memory="1TiB")
    assert found.plan.waves > 1 and found.plan.host_sums
    assert found.outlook().host_parts["sums"] == host_parts(found.captured, found.tiling, found.plan)["sums"] > 0
    (row,) = [line for line in found.explain().splitlines() if line.startswith("->")]
    assert str(len(found.plan.host_sums)) in row.split()[6]
    full = replace(found.planner, host_bytes=found.tiling.host_bytes() + HOST_MARGIN_BYTES)
    assert not full.choose(16, 2048, whole_step=True).plan.host_sums
