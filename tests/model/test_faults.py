"""A fault in a lane reaches the caller quickly, with the program around it; nothing hangs, and training can continue."""
from __future__ import annotations

import copy
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine
import pytest
import tiny_models
import torch
from tiny_models import batch, same_bits, train_step, weights
from torch import fx, nn

import megacompile
from megacompile.errors import LaneError, TornError
from megacompile.ir.program import Lane, lane_of, nodes, op_of
from megacompile.runtime.executor import Executor, Failure

SHAPE = {"rows": 3, "length": 9}
SECTIONS = ("forward", "backward", "backward_accumulate", "evaluate", "update", "load", "store")
SOON_S = 5.0


class InjectedError(Exception):
    """What tests throw into lanes."""


@pytest.fixture(scope="module", autouse=True)
def _only_own_threads() -> None:
    """Models that earlier tests in this process have forgotten end their threads now, not during a test that counts threads."""
    gc.collect()
    before, now = None, lane_threads()
    while before != now:
        time.sleep(0.1)
        before, now = now, lane_threads()


@pytest.fixture(scope="module")
def slabs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tiny_models.Shared]:
    """A model that uses every op: slabs for weights and gradients, a tile resident, a tile updated on the device, one that goes
    there for its update, one whose moments are on disk, blocks, checkpoints on the host."""
    shared = tiny_models.Shared(bf16=True, checkpoint_interval=2, micro_batch_size=2, pinned_memory="32KiB",
                                resident=("model.layers.1",), resident_state=("model.layers.0",),
                                visiting_state=("model.layers.2",), disk=tmp_path_factory.mktemp("disk"),
                                disk_state=("prologue",), host_checkpoints=True)
    megacompile.AdamW(shared.model.parameters())  # from the first optimizer on moments are there
    gc.collect()
    gc.freeze()  # tests that look for threads collect at each fault: most of their time went into what stays
    yield shared
    shared.close()


@pytest.fixture
def slab_model(slabs: tiny_models.Shared) -> Any:
    return slabs.fresh()


def executed(model: Any, section: str) -> list[fx.Node]:
    """The instructions of a section of `batch(0, **SHAPE)`'s program, in program order."""
    program = model.megacompile.program(batch(0, **SHAPE))
    if section not in program.sections:
        return []
    return [n for n in nodes(program.section(section)) if op_of(n).name not in ("enter", "leave")
            and lane_of(n) is not None]


def throw_at(model: Any, victim: fx.Node | Callable[[fx.Node], bool]) -> None:
    """The lane that comes to this instruction fails there, once."""

    def probe(node: fx.Node) -> None:
        if node is victim if isinstance(victim, fx.Node) else victim(node):
            engine.probe(model, None)
            raise InjectedError(f"at {node.name}")

    engine.probe(model, probe)


def lane_threads() -> set[threading.Thread]:
    gc.collect()  # a model that another test has forgotten ends its threads now, and not between two looks
    return {t for t in threading.enumerate() if t.name.startswith("megacompile")}


def raises_fault_soon(act: Callable[[], Any], node: fx.Node) -> None:
    """`act` raises a LaneError of this instruction, with its cause and the program around it, within 5 s."""
    begin = time.monotonic()
    with pytest.raises(LaneError) as caught:
        act()
    assert time.monotonic() - begin < SOON_S
    assert isinstance(caught.value.__cause__, InjectedError) and str(caught.value.__cause__) == f"at {node.name}"
    text = str(caught.value)
    assert text.startswith(f"{op_of(node).name} failed in lane ") and "InjectedError: at " in text.splitlines()[0]
    assert "FAILED HERE" in text and node.name in text, "the program around the fault is missing"


def one_of_each_op(section: list[fx.Node]) -> dict[str, fx.Node]:
    """The middle instruction of each kind, `record` and `wait` in each lane."""
    kinds: dict[str, list[fx.Node]] = {}
    for node in section:
        op = op_of(node).name
        kinds.setdefault(f"{op} {lane_of(node)}" if op in ("record", "wait") else op, []).append(node)
    return {kind: same[len(same) // 2] for kind, same in kinds.items()}


# ---------------------------------------------------------------- every kind of instruction, in every section

def runs(model: Any, section: str) -> Callable[[], Any]:
    """What makes the model run a section, and waits for it; preparations are made now."""
    handle = model.megacompile
    if section == "evaluate":
        def evaluate() -> None:
            with torch.no_grad():
                model(**batch(0, **SHAPE))
        return evaluate
    if section == "store":
        train_step(model, megacompile.AdamW(model.parameters()), **SHAPE)
        return handle.synchronize
    if section == "load":
        engine.residency(model).stale = True
        return lambda: model(**batch(0, **SHAPE))
    if section == "forward":
        return lambda: model(**batch(0, **SHAPE))
    if section == "backward_accumulate":
        model(**batch(1, **SHAPE)).loss.backward()
    loss = model(**batch(0, **SHAPE)).loss
    if section.startswith("backward"):
        return loss.backward
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    loss.backward()

    def update() -> None:
        optimizer.step()
        handle.synchronize()
    return update


@pytest.mark.sample(2)
@pytest.mark.parametrize("section", SECTIONS)
def test_a_fault_at_every_kind_of_instruction_reaches_the_caller_and_the_next_step_runs(
        slab_model: Any, slabs: tiny_models.Shared, section: str) -> None:
    model = slab_model
    if section == "evaluate":  # has a program of its own
        with torch.no_grad():
            model(**batch(0, **SHAPE))
        evaluation = next(s for s in engine.executables(model).table.values() if not s.spec.training and s.spec.length == 9)
        section_nodes = list(nodes(evaluation.program.section("evaluate")))
        victims = one_of_each_op([n for n in section_nodes if op_of(n).name not in ("enter", "leave") and lane_of(n)])
    else:
        victims = one_of_each_op(executed(model, section))
    train_step(model, megacompile.AdamW(model.parameters()), **SHAPE)  # every lane has its thread
    threads = lane_threads()
    assert len(victims) >= 3
    for kind, node in victims.items():
        slabs.fresh()
        start = weights(model)
        act = runs(model, section)
        throw_at(model, node)
        raises_fault_soon(act, node)
        assert lane_threads() == threads, f"{kind}: a thread died or was left behind"
        if section == "store":
            model.megacompile.synchronize()  # what failed is done again
        elif section != "update":
            assert same_bits(weights(model), start), f"{kind}: weights have changed"
            loss = model(**batch(0, **SHAPE)).loss
            loss.backward()
            assert loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters())
        elif engine.torn(model):
            with pytest.raises(TornError):
                model(**batch(0, **SHAPE))
        else:
            model(**batch(0, **SHAPE)).loss.backward()


def test_the_programs_of_these_tests_hold_every_op_that_is_executed(slab_model: Any) -> None:
    from megacompile.ir.program import OPS
    found = {op_of(n).name for s in SECTIONS for n in executed(slab_model, s)}
    # looked up when a section is submitted
    never = {"enter", "leave", "resident", "resident_state", "resident_gradients", "stashed", "held"}
    # (test_sums.py, test_outputs.py, test_deferral.py, test_routed_turns.py, test_held.py)
    elsewhere = {"evaluate", "outputs", "output_gradient", "offload_norms", "add_to_sum", "norms_of_sum", "update_from_sum",
                 "update_weights", "update_moments", "prefetch_routed", "hold", "fetch_held", "update_held", "return_weights",
                 "return_state"}
    # (tests/system/test_ranks_faults.py, tests/system/test_ranks_faults_of_hosts.py)
    of_ranks = {"pack_shard", "prefetch_shard", "gather", "gather_resident", "reduce_scatter", "all_reduce", "share_norms",
                "share_host_norms", "momentum", "gather_momentum", "total_loss", "share_loss", "announce"}
    assert set(OPS) - never - found <= elsewhere | of_ranks, "ops without a test"


@pytest.mark.sample(1)
@pytest.mark.parametrize("overlap", [None, "backward"])
def test_a_fault_at_every_kind_of_instruction_of_a_whole_step_leaves_it_undone_completed_or_torn(
        slab_model: Any, slabs: tiny_models.Shared, overlap: str | None) -> None:
    """With updates beside the next step, what has begun is completed by `step()`; on arrival a checkpoint is needed."""
    model = slab_model
    update = "step" if overlap is None else "arrival"
    program = model.megacompile.compiled(batch(0, **SHAPE), update=update, whole_step=True).program

    def step(optimizer: Any) -> None:
        model.megacompile.train_step(batch(0, **SHAPE), optimizer)
        model.megacompile.synchronize()

    def make() -> Any:
        slabs.fresh()
        return megacompile.AdamW(model.parameters(), lr=1e-2, overlap=overlap)

    optimizer = make()
    step(optimizer)
    expected, threads, outcomes = weights(model), lane_threads(), set()
    for section in [s for s in ("train_step", "update") if s in program.sections]:
        victims = one_of_each_op([n for n in nodes(program.section(section)) if lane_of(n) is not None
                                  and op_of(n).name not in ("enter", "leave")])
        for kind, node in victims.items():
            optimizer = make()
            start = weights(model)
            throw_at(model, node)
            raises_fault_soon(lambda: step(optimizer), node)  # noqa: B023  (called at once)
            assert lane_threads() == threads, f"{kind}: a thread died or was left behind"
            if engine.torn(model) and overlap is None:
                outcomes.add("completed")
                optimizer.step()
            elif engine.torn(model):
                outcomes.add("torn")
                with pytest.raises(TornError, match="load a checkpoint"):
                    step(optimizer)
                continue
            elif same_bits(weights(model), start):
                outcomes.add("undone")
                step(optimizer)
            assert same_bits(weights(model), expected), f"{kind}: other weights than those of one step"
            assert all(state["step"] == 1 for state in optimizer.state_dict()["state"].values()), kind
    assert outcomes == {"undone", "completed" if overlap is None else "torn"}  # or done: the fault came after the last tile


def test_a_fault_while_a_checkpoint_is_written_spoils_neither(slab_model: Any, tmp_path: Path) -> None:
    model = slab_model
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
    train_step(model, optimizer, **SHAPE)
    saved = weights(model)
    with megacompile.CheckpointWriter(tmp_path, model, optimizer, bandwidth="40KiB") as writer:
        writer.save()
        tear(model, optimizer)  # two tiles of the next step are updated, while the writer is at work
        optimizer.step()
        assert not same_bits(weights(model), saved)
    megacompile.load_checkpoint(tmp_path, model, optimizer)
    assert same_bits(weights(model), saved)
    assert all(state["step"] == 1 for state in optimizer.state_dict()["state"].values())


@pytest.mark.parametrize("labels", [True, False])
def test_an_evaluation_that_fails_is_not_left_half_done(slab_model: Any, labels: bool) -> None:
    inputs = {k: v for k, v in batch(0, **SHAPE).items() if labels or k != "labels"}
    with torch.no_grad():
        expected = slab_model(**inputs).logits
        throw_at(slab_model, lambda node: op_of(node).name in ("evaluate", "outputs"))
        with pytest.raises(LaneError, match="evaluate failed" if labels else "outputs failed"):
            slab_model(**inputs)
        assert torch.equal(slab_model(**inputs).logits, expected)


# ---------------------------------------------------------------- gradients

def test_a_backward_that_fails_leaves_no_gradient(model: Any, native: Any) -> None:
    """Accumulation that stopped half-way would leave some parameters with two batches' gradients, others with one's."""
    model(**batch(1)).loss.backward()
    loss = model(**batch(2)).loss
    throw_at(model, [n for n in executed(model, "backward_accumulate") if op_of(n).name == "accumulate"][2])
    with pytest.raises(LaneError):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())
    model(**batch(3)).loss.backward()
    native(**batch(3)).loss.backward()
    tiny_models.assert_same_gradients(model, native)


def test_a_failed_forward_leaves_no_lease(model: Any) -> None:
    throw_at(model, [n for n in executed(model, "forward") if op_of(n).name == "loss"][-1])
    with pytest.raises(LaneError):
        model(**batch(0, **SHAPE))
    assert not engine.open_forwards(model)


# ---------------------------------------------------------------- updates

def two_steps(model: Any, fault: Callable[[], None] | None, forgotten: bool = True) -> tuple[Any, dict[str, torch.Tensor]]:
    """Two steps, the first of whose updates may fail and be completed."""
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model(**batch(0, **SHAPE)).loss.backward()
    if fault is not None:
        fault()
    optimizer.step()
    if forgotten:
        optimizer.zero_grad()
    schedule.step()  # the step that is completed keeps the learning rate that it had
    if fault is not None:
        with pytest.raises(LaneError):
            model(**batch(1, **SHAPE))
        optimizer.step()
    optimizer.zero_grad()
    train_step(model, optimizer, 1, **SHAPE)
    return optimizer, weights(model)


@pytest.fixture
def undisturbed(slab_model: Any, slabs: tiny_models.Shared) -> dict[str, torch.Tensor]:
    result = two_steps(slab_model, None)[1]
    slabs.fresh()
    return result


@pytest.mark.sample(3)
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("forgotten", [True, False], ids=["zero_grad", "gradients kept"])
def test_an_update_that_stopped_half_way_is_completed_by_the_next_step(
        slab_model: Any, undisturbed: Any, number: int, forgotten: bool) -> None:
    victims = [n for n in executed(slab_model, "update") if op_of(n).name in ("update", "update_visiting")]
    optimizer, after = two_steps(slab_model, lambda: throw_at(slab_model, victims[number]), forgotten)
    assert same_bits(after, undisturbed)
    assert all(state["step"] == 2 for state in optimizer.state.values())


def tear(model: Any, optimizer: Any, number: int = 2) -> None:
    """Leaves the model with `number` tiles of a step and the others of the step before."""
    model(**batch(0, **SHAPE)).loss.backward()
    throw_at(model, [n for n in executed(model, "update") if op_of(n).name in ("update",)][number])
    optimizer.step()
    with pytest.raises(LaneError):
        model.megacompile.synchronize()


@pytest.mark.parametrize("use", [
    lambda m, d: m(**batch(1)), lambda m, d: m(input_ids=batch(1)["input_ids"]), lambda m, d: m.save_pretrained(d),
    lambda m, d: m.state_dict(), lambda m, d: copy.deepcopy(m), lambda m, d: m.zero_grad(set_to_none=False),
], ids=["forward", "evaluate", "save_pretrained", "state_dict", "deepcopy", "zero_grad"])
def test_torn_weights_are_neither_used_nor_saved(slab_model: Any, use: Any, tmp_path: Path) -> None:
    model = slab_model
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
    tear(model, optimizer)
    for _ in range(2):
        with pytest.raises(TornError, match=r"an update stopped half-way: call optimizer.step\(\) again to complete it"):
            use(model, tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(TornError):
        optimizer.state_dict()
    optimizer.step()
    use(model, tmp_path)


def test_a_loaded_checkpoint_repairs_torn_weights(slab_model: Any, undisturbed: Any) -> None:
    model = slab_model
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
    start, state = weights(model), copy.deepcopy(optimizer.state_dict())
    tear(model, optimizer)
    model.load_state_dict(start)
    optimizer.load_state_dict(state)
    model.zero_grad()
    assert same_bits(two_steps(model, None)[1], undisturbed)


@pytest.mark.nightly(held_by=(
    "tests/model/test_faults.py::test_a_fault_at_every_kind_of_instruction_of_a_whole_step_leaves_it_undone_completed_or_torn",
    "tests/model/test_whole_step.py::test_an_update_on_arrival_that_stops_half_way_is_torn_for_good"))
def test_a_fault_in_a_backward_that_updates_reaches_the_caller_and_a_checkpoint_repairs_the_model(
        slab_model: Any, slabs: tiny_models.Shared) -> None:
    """At every kind of instruction. Before the first update nothing has changed; after the last, all of it is done."""
    model = slab_model
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, overlap="backward")
    train_step(model, optimizer, **SHAPE)
    victims = one_of_each_op(executed(model, "backward"))
    assert {"update", "update_on_device", "offload", "offload_weights", "recompute_backward"} <= set(victims)
    threads, outcomes = lane_threads(), set()
    for kind, node in victims.items():
        slabs.fresh()
        start = weights(model)

        def act() -> None:
            train_step(model, optimizer, **SHAPE)
            model.megacompile.synchronize()  # an update may be on its way when the backward returns

        throw_at(model, node)
        raises_fault_soon(act, node)
        assert lane_threads() == threads, f"{kind}: a thread died or was left behind"
        assert all(p.grad is None for p in nn.Module.parameters(model))
        done = len(engine.step(model).unfinished.done) if engine.step(model).unfinished is not None else None
        outcomes.add("torn" if engine.torn(model) else "whole")
        if engine.torn(model):
            with pytest.raises(TornError, match="load a checkpoint"):
                train_step(model, optimizer, **SHAPE)
            model.load_state_dict(start)
        elif done is not None:
            assert same_bits(weights(model), start), f"{kind}: weights have changed"
        train_step(model, optimizer, **SHAPE)
        model.megacompile.whole()
    assert outcomes == {"torn", "whole"}


def test_an_update_whose_gradients_were_changed_is_not_completed_with_them(slab_model: Any) -> None:
    optimizer = megacompile.AdamW(slab_model.parameters(), lr=1e-2)
    tear(slab_model, optimizer)
    slab_model.lm_head.weight.grad.mul_(2.0)
    with pytest.raises(TornError):
        optimizer.step()


def test_another_optimizer_does_not_take_the_completion_for_its_own_step(slab_model: Any) -> None:
    first, *others = slab_model.parameters()
    optimizer, other = megacompile.AdamW(others, lr=1e-2), megacompile.AdamW([first], lr=1e-2)
    tear(slab_model, optimizer)
    with pytest.raises(TornError):
        other.step()
    optimizer.step()
    other.step()
    slab_model.megacompile.synchronize()
    assert all(o.state[p]["step"] == 1 for o in (optimizer, other) for g in o.param_groups for p in g["params"])


@pytest.mark.parametrize("again", [True, False], ids=["step again", "next batch"])
def test_an_update_that_fails_before_its_first_tile_changes_no_weight(slab_model: Any, undisturbed: Any, again: bool) -> None:
    model = slab_model
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
    start = weights(model)
    model(**batch(0, **SHAPE)).loss.backward()
    throw_at(model, next(n for n in executed(model, "update") if op_of(n).name == "clip"))
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(LaneError, match="clip failed in lane cpu"):
        model(**batch(1, **SHAPE))
    assert same_bits(weights(model), start)
    if not again:  # the batch of the failed step comes once more
        model(**batch(0, **SHAPE)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] *= 0.5
    train_step(model, optimizer, 1, **SHAPE)
    assert same_bits(weights(model), undisturbed)
    assert all(state["step"] == 2 for state in optimizer.state.values())


def test_a_whole_step_is_completed_with_its_own_gradients_though_an_evaluation_came_between() -> None:
    """Gradients of tiles that the device updates are nowhere else, and an evaluation has no slots for them."""
    def built() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = megacompile.stream(tiny_models.build(bf16=True), device="cpu",
                                   resident_state=("model.layers.0", "model.layers.1"))
        return model, megacompile.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)

    expected, optimizer = built()
    expected.megacompile.train_step(batch(0, **SHAPE), optimizer)
    model, optimizer = built()
    throw_at(model, lambda node: op_of(node).name == "clip")
    model.megacompile.train_step(batch(0, **SHAPE), optimizer)
    with pytest.raises(LaneError, match="clip failed"):
        model.megacompile.synchronize()
    model.megacompile.synchronize()
    with torch.no_grad():
        model(input_ids=batch(0, **SHAPE)["input_ids"])
    optimizer.step()
    for each in (model, expected):
        each.megacompile.synchronize()
    assert same_bits(weights(model), weights(expected))
    for each in (model, expected):
        each.megacompile.close()


def test_a_forward_that_fails_does_not_tear_the_update_in_flight(slab_model: Any, undisturbed: Any) -> None:
    model = slab_model
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
    model(**batch(0, **SHAPE)).loss.backward()
    engine.delay(model, lambda lane: time.sleep(0.02) if lane == Lane.CPU else None)
    prefetches = [n for n in executed(model, "forward") if op_of(n).name == "prefetch"]
    throw_at(model, prefetches[0])
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(LaneError, match="prefetch failed in lane h2d"):
        model(**batch(1, **SHAPE))
    engine.delay(model, None)
    assert not engine.torn(model)
    optimizer.param_groups[0]["lr"] *= 0.5
    train_step(model, optimizer, 1, **SHAPE)
    assert same_bits(weights(model), undisturbed)


def test_the_failure_of_the_earlier_of_two_runs_is_raised(slab_model: Any) -> None:
    """The forward fails first; the update before it, which goes on, fails too: that one must not be lost."""
    model = slab_model
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
    model(**batch(0, **SHAPE)).loss.backward()
    engine.delay(model, lambda lane: time.sleep(0.02) if lane == Lane.CPU else None)
    forward = next(n for n in executed(model, "forward") if op_of(n).name == "prefetch")
    update = [n for n in executed(model, "update") if op_of(n).name == "update"][-1]

    def probe(node: fx.Node) -> None:
        if node in (forward, update):
            raise InjectedError(f"at {node.name}")

    engine.probe(model, probe)
    optimizer.step()
    with pytest.raises(LaneError, match="update failed in lane cpu"):
        model(**batch(1, **SHAPE))
    engine.probe(model, None)
    assert engine.torn(model)
    optimizer.step()
    model(**batch(1, **SHAPE)).loss.backward()


def test_the_earliest_of_simultaneous_failures_is_kept(slab_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, lanes = engine.executor(slab_model), 8
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(200):
            executor.failure, start = None, threading.Barrier(lanes)

            def fail(run: int, start: threading.Barrier = start) -> None:
                start.wait()
                executor.fail(Failure(run, InjectedError(), None, None))

            threads = [threading.Thread(target=fail, args=(run,)) for run in range(lanes, 0, -1)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert executor.failure.run == 1
    finally:
        sys.setswitchinterval(before)
        executor.failure = None


@pytest.mark.parametrize("call", [
    lambda m, o: m(**batch(1)), lambda m, o: o.step(), lambda m, o: m.state_dict(), lambda m, o: m.megacompile.synchronize(),
    lambda m, o: next(m.parameters()), lambda m, o: o.state_dict(), lambda m, o: o.grad_norm,
], ids=["forward", "step", "state_dict", "synchronize", "parameters", "optimizer state", "grad_norm"])
def test_a_failed_update_is_raised_at_the_next_call_once(slab_model: Any, call: Any) -> None:
    optimizer = megacompile.AdamW(slab_model.parameters(), lr=1e-2)
    slab_model(**batch(0, **SHAPE)).loss.backward()
    throw_at(slab_model, next(n for n in executed(slab_model, "update") if op_of(n).name == "clip"))
    optimizer.step()
    limit = time.monotonic() + 60
    while engine.executor(slab_model).failure is None:
        assert time.monotonic() < limit, "the update does not fail"
        time.sleep(0.001)
    with pytest.raises(LaneError, match="clip failed"):
        call(slab_model, optimizer)
    call(slab_model, optimizer)


def test_a_model_can_be_closed_after_a_failed_update() -> None:
    before = lane_threads()
    model = megacompile.stream(tiny_models.build(num_hidden_layers=1), device="cpu")
    cls = type(model).__bases__[-1]
    optimizer = megacompile.AdamW(model.parameters())
    model(**batch(0, **SHAPE)).loss.backward()
    throw_at(model, [n for n in executed(model, "update") if op_of(n).name in ("update",)][1])
    optimizer.step()
    with pytest.raises(LaneError):
        model.megacompile.close()
    assert type(model) is cls and not hasattr(model, "megacompile") and lane_threads() == before
    model(**batch(0, **SHAPE)).loss.backward()


# ---------------------------------------------------------------- Ctrl-C

def interrupt_while_the_caller_waits(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes once the caller, waiting, has looked at lanes that have begun. Until then they stand still; then each of
    their instructions is late."""
    look, looked, sending, sent = executor._look, threading.Event(), threading.Lock(), list[Lane]()

    def noted() -> None:
        if executor.watchdog.begun:
            looked.set()
        look()

    def delay(lane: Lane) -> None:
        assert looked.wait(60), "nobody waits for the lanes"
        with sending:
            if not sent:
                sent.append(lane)
                os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.03)

    monkeypatch.setattr(executor, "_look", noted)
    executor.delay = delay


@pytest.fixture
def ctrl_c_raises() -> Iterator[None]:
    """Ctrl-C is `KeyboardInterrupt`. A process that a shell starts in the background ignores it otherwise."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_raises")
@pytest.mark.parametrize("section", ["forward", "backward", "evaluate", "update"])
def test_ctrl_c_stops_the_step_and_leaves_the_model_usable(
        model: Any, native: Any, section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = engine.executor(model)
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
    train_step(model, optimizer, **SHAPE)
    train_step(native, torch.optim.AdamW(native.parameters(), lr=1e-2), **SHAPE)
    act = runs(model, section) if section != "update" else None
    if act is None:
        model(**batch(1)).loss.backward()
        act = lambda: (optimizer.step(), model.megacompile.synchronize())  # noqa: E731
    interrupt_while_the_caller_waits(executor, monkeypatch)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        act()
    assert time.monotonic() - begin < SOON_S
    engine.delay(model, None)
    if section == "update":  # in flight when Ctrl-C came: it goes on to its end
        assert not engine.torn(model)
        return
    model.zero_grad()
    model(**batch(2)).loss.backward()
    native.zero_grad()
    native(**batch(2)).loss.backward()
    tiny_models.assert_same_gradients(model, native, 1e-4)


def test_ctrl_c_while_a_section_is_handed_to_the_lanes_hangs_nothing(model: Any) -> None:
    """Lanes that have got the section must not wait for those that have not."""
    executor = engine.executor(model)
    train_step(model, megacompile.AdamW(model.parameters()), **SHAPE)
    queue_of, lower = executor._queue, executor._lower

    def interrupted(lane: Lane) -> Any:
        if lane == Lane.H2D:
            raise KeyboardInterrupt
        return queue_of(lane)

    # Weights come last, and never: compute has got its instructions and waits for them.
    executor._lower = lambda section: dict(sorted(lower(section).items(), key=lambda item: item[0] == Lane.H2D))
    executor._queue = interrupted
    begin = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            model(**batch(0, **SHAPE))
    finally:
        executor._queue, executor._lower = queue_of, lower
    assert time.monotonic() - begin < SOON_S
    model(**batch(0, **SHAPE)).loss.backward()
