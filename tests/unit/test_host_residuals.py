"""Residuals in host memory: which of them are on the device, what comes back, and what is refused."""
from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
from tiny_models import batch, same_bits
from torch import Tensor, fx

import megacompile
from megacompile.errors import InsufficientMemoryError, LaneError, MegacompileError, ProgramError
from megacompile.ir.plan import Plan
from megacompile.ir.program import Builder, Program, argument, copy_section, find, nodes, op_of, operands
from megacompile.planning.config import StreamConfig
from megacompile.runtime.memory.packed_residuals import ALIGNMENT, packed
from megacompile.verify.verifier import verify
from megacompile.weights.tiling import HOST_MARGIN_BYTES

OPTIONS = {"micro_batch_size": 1, "saved_layers": 3, "host_residuals": 2}


shared = tiny_models.shared_in_module(**OPTIONS)


@pytest.fixture
def model(shared: tiny_models.Shared) -> Any:
    return shared.fresh()


# ---------------------------------------------------------------- training

def test_gradients_are_those_of_native_pytorch(model: Any, shared: tiny_models.Shared) -> None:
    native = shared.native()
    for seed in range(3):
        for each in (model, native):
            each.zero_grad()
            each(**batch(seed)).loss.backward()
        tiny_models.assert_same_gradients(model, native)


def test_two_open_forwards_keep_their_residuals_apart(model: Any, shared: tiny_models.Shared) -> None:
    """And their backwards come in either order, with lanes that are late."""
    native, streamed, draw = shared.native(), model.megacompile.streamed, random.Random(0)
    streamed.executor.delay = lambda lane: time.sleep(draw.random() * 1e-3)
    for order in ((0, 1), (1, 0)):
        losses = [model(**batch(seed)).loss for seed in range(2)]
        for number in order:
            losses[number].backward()
            native(**batch(number)).loss.backward()
        tiny_models.assert_same_gradients(model, native)
    buffers = streamed.activation_checkpoints
    assert len(buffers.made) == 2 == len(buffers.idle)


@pytest.mark.parametrize("op", ["stash_residuals", "release_residuals", "residual_memory", "fetch_residuals"])
def test_a_step_that_fails_there_leaves_the_next_one_right(model: Any, op: str) -> None:
    executor = model.megacompile.streamed.executor
    model(**batch(0)).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    def probe(node: fx.Node) -> None:
        if op_of(node).name == op and argument(node, "mb") != 0:
            executor.probe = None
            raise RuntimeError("thrown by a test")

    executor.probe = probe
    with pytest.raises(LaneError, match="thrown by a test"):
        model(**batch(0)).loss.backward()
    model.zero_grad()
    model(**batch(0)).loss.backward()
    assert same_bits({name: p.grad for name, p in model.named_parameters()}, expected)
    buffers = model.megacompile.streamed.activation_checkpoints
    assert len(buffers.idle) == len(buffers.made) <= 2


def test_the_number_of_layers_can_change_between_steps(model: Any) -> None:
    model(**batch(0)).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    for options in ({"host_residuals": 1}, {"host_residuals": 0, "saved_layers": 1}, {"host_residuals": 2, "saved_layers": 3}):
        model.zero_grad()
        model.megacompile.replan(**options)
        model(**batch(0)).loss.backward()
        assert model.megacompile.plan.host_residuals == options["host_residuals"]
        assert same_bits({name: p.grad for name, p in model.named_parameters()}, expected)


@pytest.mark.on_demand
def test_compiled_layers_get_residuals_with_their_own_strides() -> None:
    found = []
    for options in ({}, {"host_residuals": 2}):
        model = megacompile.stream(tiny_models.build(bf16=True), device="cpu", compile=True, saved_layers=3, micro_batch_size=1,
                                   **options)
        model(**batch(0)).loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
        model.megacompile.close()
    assert same_bits(*found)


# ---------------------------------------------------------------- schedules

def plan_of(layers: int, saved: int, on_host: int) -> tuple[list[str], Plan]:
    return [f"layers.{i}" for i in range(layers)], Plan.of(1, 8, (1,), saved_layers=saved, host_residuals=on_host)


@pytest.mark.parametrize(("saved", "asked", "on_host", "recomputed"), [
    (4, 1, 1, 2), (4, 3, 3, 2), (4, 4, 3, 2), (6, 5, 5, 0), (9, 9, 5, 0), (1, 3, 0, 5), (0, 3, 0, 6)])
def test_first_layers_send_residuals_to_the_host_and_the_last_keep_them(
        saved: int, asked: int, on_host: int, recomputed: int) -> None:
    layers, plan = plan_of(6, saved, asked)
    assert plan.residuals_on_host(layers) == layers[:on_host]
    assert plan.recomputed(layers) == layers[on_host:on_host + recomputed]


@pytest.mark.parametrize(("layers", "saved", "on_host"), [(6, 5, 2), (6, 6, 4), (7, 3, 2), (4, 4, 3), (8, 6, 3)])
@pytest.mark.parametrize("micro_batches", [(1,), (1, 1, 1)])
@pytest.mark.parametrize("whole_step", [False, True])
def test_residuals_of_no_more_layers_are_on_the_device_than_of_those_that_stay(
        layers: int, saved: int, on_host: int, micro_batches: tuple[int, ...], whole_step: bool, make_schedule: Any) -> None:
    """At any time, in program order, which the compute lane keeps to."""
    program = make_schedule(layers=layers, micro_batches=micro_batches, saved_layers=saved, host_residuals=on_host,
                            whole_step=whole_step).program
    most, there = (saved - on_host) * len(micro_batches), set[tuple[str, int]]()
    counts = []
    for section in ("train_step",) if whole_step else ("forward", "backward"):
        for node in nodes(program.section(section)):
            value = next(iter(operands(node, "value")), node)
            of = argument(value, "call"), argument(value, "mb")
            match op_of(node).name:
                case "forward_saving" | "residual_memory":
                    there.add(of)
                case "release_residuals":
                    there.remove(of)
                case "backward":
                    there.remove(of)
            counts.append(len(there))
    assert max(counts) == most and counts[-1] == 0


def test_copies_are_spread_over_forward_and_backward(make_schedule: Any) -> None:
    """Between two of them there is about as much to compute as between any other two."""
    program = make_schedule(layers=8, micro_batches=(1, 1), saved_layers=5, host_residuals=2, whole_step=True).program
    for copy, computes in (("stash_residuals", ("forward", "forward_saving")), ("fetch_residuals", ("backward",))):
        order = [op_of(node).name for node in find(program.section("train_step"), copy, *computes)]
        gaps = [len(part) for part in "".join("c" if name == copy else "." for name in order).split("c")[1:-1]]
        assert len(gaps) == 3 and max(gaps) - min(gaps) <= 1 and min(gaps) >= 1, order


# ---------------------------------------------------------------- what the verifier refuses

def edited(program: Program, section: str, op: str, change: Callable[[fx.Node, Builder], object]) -> Program:
    """The program with a change to the first node of this op."""
    graph = copy_section(program.section(section))
    change(next(find(graph, op)), Builder(graph, "edited"))
    return program.evolve(sections={**program.sections, section: graph})


def move_to_end(node: fx.Node, build: Builder) -> None:
    last = list(nodes(node.graph))[-1]
    last.append(node)


@pytest.mark.parametrize(("section", "op", "change", "message"), [
    ("forward", "release_residuals", lambda n, b: n.graph.erase_node(n), "are stashed, but stay on the device"),
    ("forward", "release_residuals", lambda n, b: b.before(n, "release_residuals", **n.kwargs), "after the residuals of .* we"),
    ("forward", "stash_residuals", lambda n, b: n.graph.erase_node(n), "takes a set of residuals in backward that no forward"),
    ("forward", "stash_residuals", move_to_end, "releases residuals that are not in host memory"),
    ("forward", "stash_residuals", lambda n, b: n.update_kwarg("value", next(find(n.graph, "forward"))), "another set of"),
    ("forward", "stash_residuals", lambda n, b: n.update_kwarg("mb", 1), "which is another set of residuals"),
    ("forward", "stash_residuals", lambda n, b: b.after(n, "release", value=n), "although a later section fetches it"),
    ("backward", "stashed_residuals", lambda n, b: n.update_kwarg("into", "HR3"), "takes its set of residuals from HR3"),
    ("backward", "stashed_residuals", lambda n, b: n.update_kwarg("mb", 1), "second stashed_residuals of its set of residuals"),
    ("backward", "fetch_residuals", lambda n, b: n.update_kwarg("call", "layers.2"), "which is another set of residuals"),
    ("backward", "fetch_residuals", lambda n, b: b.after(n, "fetch_residuals", **n.kwargs), "fills q2_0 a second time"),
    ("backward", "fetch_residuals", lambda n, b: n.graph.erase_node(n), "before residuals are fetched into it"),
    ("backward", "fetch_residuals", move_to_end, "after its release|before residuals are fetched into it"),
])
def test_residuals_that_do_not_come_back_are_refused(section: str, op: str, change: Any, message: str,
                                                     make_schedule: Any) -> None:
    program = make_schedule(micro_batches=(1, 1), saved_layers=3, host_residuals=2).stages["place"]
    verify(program)
    with pytest.raises(ProgramError, match=message):
        verify(edited(program, section, op, change))


@pytest.mark.parametrize("whole_step", [False, True])
def test_a_backward_that_reads_released_residuals_is_refused(whole_step: bool, make_schedule: Any) -> None:
    program = make_schedule(saved_layers=3, host_residuals=1, whole_step=whole_step).stages["differentiate"]
    verify(program)
    section = "train_step" if whole_step else "backward"
    staged = make_schedule(saved_layers=3, host_residuals=1, whole_step=whole_step).stages["host_residuals"]
    verify(staged)
    graph = copy_section(staged.section(section))
    (last,) = (n for n in find(graph, "backward") if argument(n, "call") == "layers.0")
    made = next(n for n in nodes(graph) if op_of(n).name == ("forward_saving" if whole_step else "leased")
                and argument(n, "call") == "layers.0")
    last.update_kwarg("saved", made)
    with pytest.raises(ProgramError, match="reads residuals of h1_0, which were released"):
        verify(staged.evolve(sections={**staged.sections, section: graph}))


# ---------------------------------------------------------------- plans

@pytest.mark.parametrize("wrong", [-1, 2.5, True, "all"])
def test_an_invalid_number_of_layers_is_refused(wrong: Any) -> None:
    with pytest.raises(MegacompileError, match="host_residuals must be a whole number of at least 0"):
        StreamConfig(host_residuals=wrong)


def scheduled(**options: Any) -> Any:
    with torch.device("meta"):
        bare = tiny_models.build(num_hidden_layers=8, hidden_size=256, intermediate_size=1024, num_attention_heads=4)
    return megacompile.schedule(bare, batch=8, length=1024, hardware="h200", whole_step=True, micro_batch_size=1, waves=1,
                                residuals="all", resident_state=(), **options)


def test_more_layers_keep_residuals_in_the_same_device_memory() -> None:
    budget = "1000MiB"
    plans = [scheduled(device_memory=budget, host_residuals=count).plan for count in (0, 1, 2)]
    assert plans[0].saved_layers == 2
    assert [plan.saved_layers - plans[0].saved_layers for plan in plans] == [0, 1, 2], plans


def test_residuals_that_the_host_cannot_hold_are_refused_by_their_size() -> None:
    free = scheduled(host_residuals=3, saved_layers=5)
    needed = free.planner.host_parts(free.plan)["residuals"]
    assert needed > 8 * 3 * 1024 * 256 * 4
    with pytest.raises(InsufficientMemoryError, match=r"needs .* of residuals.* in host memory, and .* are left"):
        scheduled(host_residuals=3, saved_layers=5,
                  host_memory=free.planner.tiling.host_bytes() + HOST_MARGIN_BYTES + needed // 2)


def test_what_residuals_take_of_the_host_is_listed() -> None:
    free = scheduled(host_residuals=3, saved_layers=5)
    needed = free.planner.host_parts(free.plan)["residuals"]
    shown = free.explain()
    assert f"residuals        {needed / 2**30:.1f}" in shown and "5 (3 on the host)" in shown


# ---------------------------------------------------------------- in one buffer

def through_a_buffer(residuals: list[Any]) -> tuple[list[Any], int]:
    packing, memory = packed(residuals)
    buffer = torch.full((packing.bytes,), 255, dtype=torch.uint8)
    for where, piece in zip(packing.pieces, memory, strict=True):
        assert where.start % ALIGNMENT == 0
        buffer[where].copy_(piece)
    return [*packing.residuals([buffer[where].clone() for where in packing.pieces])], packing.bytes


def strided() -> dict[str, list[Any]]:
    whole = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    return {
        "contiguous": [whole, whole.bfloat16()], "transposed": [whole.t()], "expanded": [whole[:1].expand(5, 64)],
        "with gaps": [whole[:, 3:7], whole[::2]], "views of one piece": [whole[:2], whole[1:], whole.flatten()[7:]],
        "no elements": [whole[:0], whole], "a number between": [whole, 3, whole > 0, None],
        "bytes at an odd place": [whole.view(torch.uint8)[:, 1:9]], "one element": [whole[2, 3]],
        "none": []}


@pytest.mark.parametrize("kind", strided())
def test_residuals_come_back_with_their_values_strides_and_shared_memory(kind: str) -> None:
    given = strided()[kind]
    found, size = through_a_buffer(given)
    assert len(found) == len(given)
    for one, other in zip(given, found, strict=True):
        if not isinstance(one, Tensor):
            assert one == other
            continue
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype) and torch.equal(one, other)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in given if isinstance(t, Tensor)}
    assert size <= sum(storages.values()) + ALIGNMENT * len(storages), "shared memory is copied once"
