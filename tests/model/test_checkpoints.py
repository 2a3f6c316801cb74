"""Activation checkpoints in host memory: which buffers are in use, when they are freed, and when a plan uses them."""
from __future__ import annotations

import gc
import random
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import engine
import pytest
import tiny_models
import torch
from tiny_models import batch, same_bits
from torch import fx

import megacompile
from megacompile.errors import InsufficientMemoryError, LaneError, MegacompileError, ProgramError
from megacompile.ir.plan import Plan
from megacompile.ir.program import Builder, Lane, Program, argument, copy_section, find, nodes, op_of
from megacompile.planning.config import StreamConfig
from megacompile.planning.planner import Planner
from megacompile.predict import cost
from megacompile.runtime.memory import activation_checkpoints, arena
from megacompile.runtime.memory.activation_checkpoints import HostCheckpoint, as_bytes, as_tensor, dense, described
from megacompile.verify.verifier import verify

OPTIONS = {"micro_batch_size": 2, "host_checkpoints": True}


shared = tiny_models.shared_in_module(**OPTIONS)


@pytest.fixture
def model(shared: tiny_models.Shared) -> Any:
    return shared.fresh()


def buffers(model: Any) -> activation_checkpoints.HostCheckpoints:
    return engine.activation_checkpoints(model)


def idle(model: Any) -> bool:
    """Whether no forward has a set of buffers."""
    return len(buffers(model).idle) == len(buffers(model).made)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


# ---------------------------------------------------------------- who has the buffers

def test_buffers_are_reused_from_step_to_step(model: Any) -> None:
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
    taken = set()
    for seed in range(3):
        tiny_models.train_step(model, optimizer, seed)
        assert idle(model)
        taken.add(buffers(model).bytes())
    assert len(taken) == 1 and taken != {0}
    slots = model.megacompile.program(batch()).slots
    assert taken == {sum(slot.bytes for name, slot in slots.items() if name.startswith("H"))}


def test_two_open_forwards_have_buffers_of_their_own(model: Any, shared: tiny_models.Shared) -> None:
    """And their backwards come in either order, with lanes that are late."""
    native = shared.native()
    draw = random.Random(0)
    engine.delay(model, lambda lane: time.sleep(draw.random() * 2e-3 if lane != Lane.COMPUTE else 0))
    for order in ((0, 1), (1, 0)):
        losses = [model(**batch(seed)).loss for seed in range(2)]
        assert len(buffers(model).made) == 2 and not buffers(model).idle
        assert engine.open_forwards(model)[0].host is not engine.open_forwards(model)[1].host
        for number in order:
            losses[number].backward()
            native(**batch(number)).loss.backward()
        tiny_models.assert_same_gradients(model, native)
        assert idle(model)


def test_a_loss_without_its_backward_gives_its_buffers_back(model: Any) -> None:
    loss = model(**batch(0)).loss
    assert not idle(model)
    made = len(buffers(model).made)
    del loss
    gc.collect()
    assert idle(model)
    model(**batch(1)).loss.backward()
    assert len(buffers(model).made) == made


@pytest.mark.parametrize("op", ["stash", "loss"])
def test_a_forward_that_fails_gives_its_buffers_back(model: Any, op: str) -> None:
    model(**batch(0)).loss.backward()
    expected, made = gradients(model), len(buffers(model).made)
    model.zero_grad()

    def probe(node: fx.Node) -> None:
        if op_of(node).name == op:
            engine.probe(model, None)
            raise RuntimeError("thrown by a test")

    engine.probe(model, probe)
    with pytest.raises(LaneError) as caught:  # the traceback, and with it the forward, lives on
        model(**batch(0)).loss.backward()
    model.zero_grad()
    assert caught.value is not None and idle(model)
    model(**batch(0)).loss.backward()
    assert same_bits(gradients(model), expected) and len(buffers(model).made) == made


def test_a_longer_batch_grows_the_buffers_and_a_shorter_one_takes_them_as_they_are(
        model: Any, shared: tiny_models.Shared) -> None:
    pool, native, sizes = buffers(model), shared.native(), []
    for length in (5, 41, 5, 41):
        model(**batch(0, length=length)).loss.backward()
        native(**batch(0, length=length)).loss.backward()
        sizes.append(pool.bytes())
    tiny_models.assert_same_gradients(model, native)
    assert sizes[0] <= sizes[1] == sizes[2] == sizes[3]
    assert sizes[1] >= 2 * 3 * 41 * 16 * 4, "of three layers, two boundaries"


def test_too_little_host_memory_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = megacompile.stream(tiny_models.build(), device="cpu", **OPTIONS)
    try:
        monkeypatch.setattr(activation_checkpoints, "available_host_bytes", lambda: 100)
        with pytest.raises(InsufficientMemoryError, match=r"activation checkpoints need .* and 100 B are available: use fewer"):
            model(**batch())
        assert not engine.open_forwards(model)
        monkeypatch.undo()
        model(**batch()).loss.backward()
    finally:
        model.megacompile.close()


def test_too_little_host_memory_for_slabs_is_refused_before_any_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second backward before `step()` brings its gradients through slabs, which nothing needed until then."""
    model = megacompile.stream(tiny_models.build(), device="cpu")
    try:
        model(**batch()).loss.backward()
        before = dict(engine.arena(model).slots)
        loss = model(**batch()).loss
        with monkeypatch.context() as patched:
            patched.setattr(arena, "available_host_bytes", lambda: 100)
            with pytest.raises(InsufficientMemoryError, match=r"slabs need .* and 100 B are available: stream with fewer"):
                loss.backward()
        assert engine.arena(model).slots == before
    finally:
        model.megacompile.close()


def test_host_memory_counts_the_buffers_and_closing_gives_them_back() -> None:
    model = megacompile.stream(tiny_models.build(), device="cpu", **OPTIONS)
    handle, before = model.megacompile, model.megacompile.stats["host_bytes"]
    loss = model(**batch()).loss
    assert handle.stats["host_bytes"] - before == buffers(model).bytes() > 0
    pool = buffers(model)
    handle.close()
    assert pool.bytes() == 0
    with pytest.raises(MegacompileError, match="the model was closed"):
        loss.backward()


def test_checkpoints_in_host_memory_hold_no_device_memory(model: Any) -> None:
    plain = megacompile.stream(tiny_models.build(), device="cpu", micro_batch_size=2)
    try:
        losses = [m(**batch()).loss for m in (model, plain)]
        ours, theirs = (engine.open_forwards(m)[0].device_bytes for m in (model, plain))
        hidden = 3 * 9 * 16 * 4
        assert theirs - ours == 2 * hidden, "of three layers, two boundaries"
        assert len(losses) == 2
    finally:
        plain.megacompile.close()


# ---------------------------------------------------------------- what is in a buffer

def test_tensors_of_any_layout_come_back_as_they_were() -> None:
    whole = torch.arange(2 * 5 * 3.0).view(2, 5, 3)
    given = (whole, whole.transpose(1, 2), whole[:, 1:4], whole.bfloat16()[..., :1], whole[:1].expand(4, 5, 3), whole.long()[1])
    tensors = tuple(map(dense, given))
    assert tensors[0] is given[0] and tensors[1] is given[1], "what has neither gaps nor overlaps is not copied"
    buffer = HostCheckpoint(torch.zeros(4096, dtype=torch.uint8), described(tensors))
    for tensor, (_, where) in zip(tensors, buffer.pieces(), strict=True):
        assert where.start % activation_checkpoints.ALIGNMENT == 0
        buffer.memory[where] = as_bytes(tensor)
    for tensor, original, (part, where) in zip(tensors, given, buffer.pieces(), strict=True):
        again = as_tensor(buffer.memory[where], part)
        assert torch.equal(again, original) and again.stride() == tensor.stride() and again.dtype == original.dtype


# ---------------------------------------------------------------- schedules

def edited(program: Program, section: str, op: str, change: Any) -> Program:
    graph = copy_section(program.section(section))
    change(next(iter(find(graph, op))), Builder(graph))
    return program.evolve(sections={**program.sections, section: graph})


@pytest.mark.parametrize(("section", "op", "change", "message"), [
    ("backward", "stashed", lambda n, b: n.update_kwarg("into", "H3"), "takes its checkpoint from H3, but the forward puts it"),
    ("backward", "stashed", lambda n, b: n.update_kwarg("mb", 1), "is the second stashed of its checkpoint"),
    ("backward", "fetch", lambda n, b: n.update_kwarg("call", "layers.2"), "another checkpoint"),
    ("forward", "stash", lambda n, b: n.update_kwarg("mb", 1), "another checkpoint"),
    ("forward", "stash", lambda n, b: n.graph.erase_node(n), "that no forward stashes"),
    ("forward", "stash", lambda n, b: b.after(n, "release", value=n), "although a later section fetches it"),
    ("forward", "stash", lambda n, b: b.after(n, "stash", **n.kwargs), "is the second stash of its checkpoint"),
])
def test_a_checkpoint_that_is_not_where_it_is_taken_from_is_refused(section: str, op: str, change: Any, message: str,
                                                                    make_schedule: Any) -> None:
    program = make_schedule(micro_batches=(1, 1), host_checkpoints=2).stages["place"]
    with pytest.raises(ProgramError, match=message):
        verify(edited(program, section, op, change))


def test_a_checkpoint_that_is_read_where_it_is_is_refused(make_schedule: Any) -> None:
    program = make_schedule(micro_batches=(1, 1), host_checkpoints=2).stages["prefetch"]
    with pytest.raises(ProgramError, match="which is in host memory"):
        verify(edited(program, "backward", "fetch", lambda n, b: n.replace_all_uses_with(argument(n, "stashed"))))


def test_a_checkpoint_leaves_as_soon_as_it_is_made_and_is_fetched_one_micro_batch_ahead(make_schedule: Any) -> None:
    stages = make_schedule(micro_batches=(1, 1), host_checkpoints=3).stages
    forward = list(nodes(stages["place"].section("forward")))
    for stash in find(stages["place"].section("forward"), "stash"):
        between = forward[forward.index(argument(stash, "value")) + 1:forward.index(stash)]
        assert not [n for n in between if op_of(n).lane == Lane.COMPUTE]
    order = [n for n in nodes(stages["place"].section("backward")) if op_of(n).name in ("fetch", "recompute_backward")]
    ahead = 0
    for node in order[:-4]:  # the first layer and the prologue begin with what stays on the device
        ahead += 1 if op_of(node).name == "fetch" else -1
        assert 0 <= ahead <= 2
    assert [op_of(n).name for n in order[:3]] == ["fetch", "fetch", "recompute_backward"]


def test_a_wave_fetches_nothing_before_its_loss(make_schedule: Any) -> None:
    program = make_schedule(micro_batches=(1, 1), waves=2, whole_step=True, host_checkpoints=3).program
    graph = program.section("train_step")
    lost = set()
    for node in find(graph, "loss", "fetch"):
        if op_of(node).name == "loss":
            lost.add(argument(node, "mb"))
        assert argument(node, "mb") in lost


# ---------------------------------------------------------------- plans

@pytest.fixture(scope="module")
def analysis() -> Any:
    """The model of `test_chunks.py`, which is captured once for both."""
    sizes = dict(vocab_size=200, hidden_size=64, intermediate_size=640, num_hidden_layers=6, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=1 << 16)
    return megacompile.api.analyse(tiny_models.build(**sizes), StreamConfig.of(device="cpu"), "cpu", None, None)


def planner(analysis: Any, budget: int = 2**50, **options: Any) -> Planner:
    return Planner(*analysis, StreamConfig.of(device="cpu", **options), budget, margin_bytes=0, keep_residuals=False)


@pytest.mark.parametrize(("given", "planned"), [(True, 5), (False, 0), (None, 0), (0, 0), (3, 3), (99, 5)])
def test_the_user_decides_how_many(given: Any, planned: int, analysis: Any) -> None:
    assert planner(analysis, host_checkpoints=given).plan(4, 64).host_checkpoints == planned


@pytest.mark.parametrize("wrong", [-1, 2.5, "all"])
def test_an_invalid_number_of_checkpoints_to_keep_is_refused(wrong: Any) -> None:
    with pytest.raises(MegacompileError, match="host_checkpoints must be a whole number of at least 0"):
        StreamConfig(host_checkpoints=wrong)


@pytest.mark.parametrize("update", [None, "step"])
def test_checkpoints_go_to_the_host_where_nothing_else_fits_and_as_few_as_need_to(update: str | None, analysis: Any) -> None:
    batch, length = 64, 64
    options = {"micro_batch_size": 1, "checkpoint_interval": 1}
    need = [planner(analysis).estimate(planner(analysis, host_checkpoints=n, **options).plan(batch, length)).total
            for n in range(6)]
    assert need == sorted(need, reverse=True) and len(set(need)) == 6

    def within(budget: int, **more: Any) -> Plan:
        found = planner(analysis, budget, **options, **more)
        return found.plan(batch, length) if update is None else found.plan_step(batch, length, update)

    for count, bytes_needed in enumerate(need):
        assert within(bytes_needed).host_checkpoints == count
    with pytest.raises(InsufficientMemoryError, match=r"host_checkpoints=5\)"):
        within(need[-1] - 1, waves=1)
    assert update is None or within(need[-1] - 1).waves > 1


def on_an_h200(layers: int, length: int, **options: Any) -> Any:
    """One sequence of the 7B shape, planned on the meta device."""
    from transformers import AutoModelForCausalLM, Qwen2Config
    sizes = {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": layers,
             "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 1 << 20}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**sizes), dtype=torch.bfloat16)
    return megacompile.schedule(model, batch=1, length=length, hardware="h200", **options)


@pytest.mark.nightly(
    held_by="tests/model/test_checkpoints.py::test_checkpoints_go_to_the_host_where_nothing_else_fits_and_as_few_as_need_to")
def test_long_sequences_keep_attention_s_results_where_all_residuals_do_not_fit() -> None:
    """Half a million tokens are computed in chunks, with these results too; 65,536 on less memory send checkpoints away."""
    long, recomputed = on_an_h200(4, 524288), on_an_h200(4, 524288, residuals="all")
    assert (long.plan.residuals, long.plan.saved_layers, recomputed.plan.saved_layers) == ("attention", 4, 0)
    assert long.plan.token_chunk and long.simulate().step_s < 0.85 * recomputed.simulate().step_s
    tight = on_an_h200(8, 65536, device_memory="24GiB", whole_step=True)
    assert tight.plan.residuals == "attention" and tight.plan.saved_layers and tight.plan.host_checkpoints
    assert tight.planner.fits(tight.plan)
    template = long.planner.captured.templates[long.planner.captured.calls[1].template]
    keys = 524288 * 4 * 128 * 2
    assert [_holes(template, "backward", *how) for how in ((16384, "attention"), (0, "attention"))] == [4 * keys, 0], (
        "keys, values and their gradients leave holes, where an estimate has nothing to spare")


def _holes(template: Any, variant: str, chunk: int, residuals: str) -> int:
    """Bytes of the peak that `_hole_bytes` is."""
    measured = template, template.variant(variant, chunk, residuals), 1, 524288, True
    with mock.patch.object(cost, "_hole_bytes", return_value=0):
        without = cost._peak_bytes(*measured)
    return cost._peak_bytes(*measured) - without


@pytest.mark.nightly(held_by=(
    "tests/model/test_checkpoints.py::test_checkpoints_go_to_the_host_where_nothing_else_fits_and_as_few_as_need_to",
    "tests/model/test_chunks.py::test_chunks_are_the_last_resort"))
def test_half_a_million_tokens_of_a_7b_model_fit_an_h200() -> None:
    """Hidden states alone are 98 GiB, of 139."""
    length = 524288
    found = on_an_h200(28, length)
    planner, plan = found.planner, found.plan
    assert plan.token_chunk and plan.host_checkpoints
    assert planner.estimate(plan).total + planner.margin_bytes <= planner.device_bytes < 139 * 2**30
    timeline = found.simulate()
    assert timeline.occupancy(Lane.COMPUTE) > 0.99, "copies are hidden"
    with pytest.raises(InsufficientMemoryError):
        replace(planner, config=StreamConfig(host_checkpoints=False)).plan(1, length)
    everything = replace(plan, host_checkpoints=27)
    assert planner.estimate(everything).total < 60 * 2**30
    assert planner.simulator is not None
    assert planner.simulator.timeline(everything, whole_step=False).step_s == pytest.approx(timeline.step_s, rel=0.01)
    slots = planner.simulator.program(everything, whole_step=False).slots
    device, host = (sum(slot.bytes for name, slot in slots.items() if name[0] == letter) for letter in "CH")
    assert host == 27 * length * 3584 * 2 and device == 2 * length * 3584 * 2
