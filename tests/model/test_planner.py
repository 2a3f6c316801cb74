"""The memory model says what plans take, and the planner picks plans that fit it."""
from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import engine
import pytest
import tiny_models
import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megacompile
from megacompile import api
from megacompile.errors import InsufficientMemoryError, MegacompileError
from megacompile.frontend.ops import attention, linear_cross_entropy
from megacompile.ir.plan import RESIDUALS, Plan, split
from megacompile.ir.program import model_program
from megacompile.passes import PIPELINE
from megacompile.passes.pipeline import compile_program
from megacompile.planning.config import StreamConfig
from megacompile.planning.memory import Estimate, planned_calls
from megacompile.planning.planner import Planner
from megacompile.predict import cost
from megacompile.runtime.backends.threads import ThreadBackend
from megacompile.sizes import format_bytes
from megacompile.streaming.programs import executables
from megacompile.system.host_memory import available_host_bytes, host_bytes

LENGTH, DEPTH = 64, 6
SIZES = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": DEPTH,
         "num_attention_heads": 4, "num_key_value_heads": 2}
BUDGETS_UP = range(2 * 2**20, 18 * 2**20, 2**17)

Analysis = tuple[Any, Any]


def analyse(model: nn.Module) -> Analysis:
    return api.analyse(model, StreamConfig.of(device="cpu"), "cpu", None, None)


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    """A captured model of six layers and its tiling."""
    return analyse(tiny_models.build(**SIZES))


@pytest.fixture
def tied_analysis() -> Analysis:
    return analyse(tiny_models.build(**SIZES, tie_word_embeddings=True))


def planner(analysis: Analysis, budget: int = 2**40, margin: int = 0, **options: Any) -> Planner:
    return Planner(*analysis, StreamConfig.of(device="cpu", **options), budget, margin_bytes=margin)


def plan(analysis: Analysis, batch: int = 8, length: int = LENGTH, micro_batch_size: int = 2, **choices: Any) -> Plan:
    defaults = {"checkpoint_interval": 1, "weight_slots": 2}
    return Plan.of(batch, length, split(batch, micro_batch_size), **{**defaults, **choices})


def estimate(analysis: Analysis, training: bool = True, **choices: Any) -> Estimate:
    chosen = plan(analysis, **choices)
    return planner(analysis).estimate(chosen, training)


# ---- the memory model ------------------------------------------------------------------------------------------------

CHOICES: list[dict[str, Any]] = [
    {}, {"checkpoint_interval": 2, "weight_slots": 3}, {"checkpoint_interval": 4, "weight_slots": 5}, {"weight_slots": 1},
    {"gradient_slots": 1}, {"gradient_slots": 5}, {"saved_layers": 6}, {"resident": ("prologue",)},
    {"resident": ("model.layers.0", "epilogue")}, {"pinned": False}, {"host_checkpoints": 3},
    {"saved_layers": 4, "micro_batch_size": 8},
    {"host_checkpoints": 1, "micro_batch_size": 8}, {"host_checkpoints": 5, "checkpoint_interval": 2, "weight_slots": 3},
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("choices", [*CHOICES, {"resident": "all"}], ids=str)
def test_estimated_slots_are_those_of_the_program(choices: dict[str, Any], analysis: Analysis) -> None:
    captured, tiling = analysis
    if choices.get("resident") == "all":
        choices = {"resident": tuple(tiling.layouts)}
    chosen = plan(analysis, **choices)
    model = model_program(planned_calls(captured, tiling, chosen), tiling.tiles(), 8, labels=True)
    program = compile_program(model, chosen, PIPELINE).program
    slots = sum(slot.bytes for name, slot in program.slots.items() if name[0] in "WRGC")
    assert planner(analysis).estimate(chosen).slots == slots


@pytest.mark.nightly(held_by="tests/model/test_planner.py::test_estimated_slots_are_those_of_the_program")
def test_estimated_slots_of_tied_embeddings_are_those_of_the_program(tied_analysis: Analysis) -> None:
    test_estimated_slots_are_those_of_the_program({}, tied_analysis)


def test_slots_and_accumulators_do_not_depend_on_the_batch_and_activations_are_proportional(analysis: Analysis) -> None:
    one, two = estimate(analysis), estimate(analysis, batch=16, micro_batch_size=4)
    assert (one.slots, one.accumulators) == (two.slots, two.accumulators)
    # But for rotary tables, one for each micro-batch, and gradients of weights.
    assert 1.9 * one.checkpoints < two.checkpoints <= 2 * one.checkpoints
    assert 1.5 * one.workspace < two.workspace <= 2 * one.workspace


def test_smaller_micro_batches_take_less_workspace_and_as_many_checkpoints(analysis: Analysis) -> None:
    large, small = estimate(analysis, micro_batch_size=8), estimate(analysis, micro_batch_size=1)
    assert small.workspace < large.workspace / 4
    assert small.checkpoints == pytest.approx(large.checkpoints, rel=0.1)


@pytest.mark.nightly(held_by=(
    "tests/model/test_planner.py::test_what_is_predicted_holds_what_is_measured",
    "tests/model/test_planner.py::test_a_tight_budget_is_met_with_blocks"))
def test_a_larger_interval_keeps_fewer_checkpoints_and_recomputes_in_more_memory() -> None:
    """The model's layers, not its loss, hold most."""
    small_loss = analyse(tiny_models.build(**{**SIZES, "vocab_size": 64}))
    estimates = [estimate(small_loss, checkpoint_interval=k, weight_slots=4) for k in (1, 2, 3)]
    for less, more in itertools.pairwise(estimates):
        assert less.checkpoints > more.checkpoints
        assert less.workspace < more.workspace
        assert less.accumulators < more.accumulators


def test_each_weight_slot_takes_one_layer_and_each_kept_layer_its_residuals(analysis: Analysis) -> None:
    layer = analysis[1].layouts["model.layers.0"].weight_bytes
    assert estimate(analysis, weight_slots=4).slots - estimate(analysis, weight_slots=3).slots == layer
    checkpoints = [estimate(analysis, saved_layers=n).checkpoints for n in (1, 2, 3)]
    assert checkpoints[2] - checkpoints[1] == checkpoints[1] - checkpoints[0] > 0


def test_an_evaluation_takes_less_than_a_training_step_but_for_its_logits(analysis: Analysis) -> None:
    training, evaluation = estimate(analysis), estimate(analysis, training=False)
    logits = 8 * LENGTH * SIZES["vocab_size"] * 4
    assert evaluation.accumulators == 0
    assert 2 * logits < evaluation.total < training.total + 2 * logits


#: Our own ops, whose insides count too.
OUR_OPS = {
    torch.ops.megacompile.attention.default: attention._attention,
    torch.ops.megacompile.attention_backward.default: attention._attention_backward,
    torch.ops.megacompile.linear_cross_entropy.default: linear_cross_entropy._linear_cross_entropy,
}


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class NarrowAndWide(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.blocks = nn.ModuleList(map(Mlp, widths))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_kept_residuals_are_those_of_the_layers_that_keep_them() -> None:
    """Not those of the first kind of layer."""
    narrow, mixed = (analyse(NarrowAndWide(*widths)) for widths in ((8, 8, 8, 8), (8, 8, 400, 400)))
    extra = 392 * 8 * LENGTH * 4  # per wide layer: the output of its tanh
    for saved in (1, 2):
        more = estimate(mixed, saved_layers=saved).checkpoints - estimate(narrow, saved_layers=saved).checkpoints
        assert more >= saved * extra
    assert estimate(mixed).checkpoints == estimate(narrow).checkpoints


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations of this thread have made and that are alive. State: `peak` so far."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.given: dict[int, StorageWeakRef] = {}  # memory from elsewhere: slots, the model's own
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._forget()
        for storage in self._storages((args, kwargs)):
            if storage._cdata not in self.made and not self._is_given(storage):
                self.given[storage._cdata] = StorageWeakRef(storage)
        if func in OUR_OPS:
            with self:
                result = OUR_OPS[func](*args, **(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
        for storage in self._storages(result):
            if storage._cdata not in self.made and not self._is_given(storage):
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.made.values()))
        return result

    @staticmethod
    def _storages(values: Any) -> Iterator[Any]:
        """Storages of tensors that have memory: a tensor on the meta device describes another."""
        return (value.untyped_storage() for value in tree_leaves(values) if isinstance(value, Tensor) and not value.is_meta)

    def _is_given(self, storage: Any) -> bool:
        known = self.given.get(storage._cdata)
        return known is not None and not known.expired()

    def _forget(self) -> None:
        self.made = {key: (ref, size) for key, (ref, size) in self.made.items() if not ref.expired()}


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", [
    {"micro_batch_size": 8}, {"micro_batch_size": 2}, {"micro_batch_size": 2, "checkpoint_interval": 2},
    {"micro_batch_size": 4, "checkpoint_interval": 3}, {"micro_batch_size": 2, "saved_layers": 3},
    {"micro_batch_size": 2, "host_checkpoints": True}, {"micro_batch_size": 4, "host_checkpoints": 2, "saved_layers": 1},
    {"micro_batch_size": 1, "token_chunk": 20}, {"micro_batch_size": 4, "token_chunk": 24, "saved_layers": 3},
    {"micro_batch_size": 2, "saved_layers": 3, "residuals": "attention"},
    {"micro_batch_size": 1, "saved_layers": 6, "residuals": "attention", "token_chunk": 20}], ids=str)
def test_what_is_predicted_holds_what_is_measured(options: dict[str, Any], analysis: Analysis,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots aside, which are counted exactly: never less, and at most 40% more."""
    monkeypatch.setattr(api, "analyse", lambda *_, **__: analysis)
    analysis[0].check_shape(1, LENGTH)
    for template in analysis[0].templates.values():  # a step does not include what is traced and lowered once
        for name in template.variant_names:
            template.variant(name, options.get("token_chunk", 0), options.get("residuals", "all"))
    model = megacompile.stream(tiny_models.build(**SIZES), device="cpu", reference=True, **options)
    ids = torch.randint(0, 1000, (8, LENGTH))
    batch = {"input_ids": ids, "labels": ids}
    try:
        with LiveBytes() as training:
            model(**batch).loss.backward()
        with LiveBytes() as evaluation, torch.no_grad():
            model(**batch)
        chosen = model.megacompile.compiled(batch).plan
        for live, is_training in ((training, True), (evaluation, False)):
            predicted = planner(analysis, **options).estimate(chosen, is_training)
            assert live.peak <= predicted.total - predicted.slots <= 1.4 * live.peak
    finally:
        model.megacompile.close()


@pytest.mark.parametrize("length", [64, 256])
def test_the_estimate_of_math_attention_holds_its_scores(length: int) -> None:
    """As CUDA in fp32 uses it: several [B, H, T, T] in float32 at once, which no op returns."""
    query, key = torch.randn(2, length, 4, 16).transpose(1, 2), torch.randn(2, length, 2, 16).transpose(1, 2)
    for softcap in (0.0, 30.0):
        options = (0.25, 0, softcap, "math")
        with LiveBytes() as forward:
            results = torch.ops.megacompile.attention(query, key, key, *options)
        with LiveBytes() as backward:
            gradients = torch.ops.megacompile.attention_backward(results[0], query, key, key, *results, *options)
        for live, op, given, made in ((forward, torch.ops.megacompile.attention, (query, key, key), results),
                                      (backward, torch.ops.megacompile.attention_backward,
                                       (results[0], query, key, key, *results), gradients)):
            graph = fx.Graph()
            node = graph.call_function(op.default, (*(graph.placeholder(f"x{i}") for i in range(len(given))), *options))
            for argument, tensor in zip(node.all_input_nodes, given, strict=True):
                argument.meta["val"] = tensor
            predicted = cost.WORKSPACE[op.default](node, int, "cuda") + sum(t.nbytes for t in made)
            assert live.peak <= predicted <= 1.4 * live.peak


# ---- the planner -----------------------------------------------------------------------------------------------------


def test_with_memory_to_spare_there_is_one_micro_batch_and_no_block(analysis: Analysis) -> None:
    chosen = planner(analysis).plan(8, LENGTH)
    assert (chosen.micro_batches, chosen.checkpoint_interval) == ((8,), 1)


def test_a_plan_fits_its_budget_and_more_memory_never_gives_a_slower_one(analysis: Analysis) -> None:
    """Slower: with checkpoints in host memory, of a larger K, or, for the same K, of smaller micro-batches."""
    before: Plan | None = None
    seen = set()

    def rank(plan: Plan) -> tuple[int, ...]:
        return bool(plan.host_checkpoints), plan.checkpoint_interval, -plan.micro_batches[0], plan.host_checkpoints

    for budget in BUDGETS_UP:
        within = planner(analysis, budget, margin=1000)
        try:
            chosen = within.plan(8, LENGTH)
        except InsufficientMemoryError:
            assert before is None, f"{budget} bytes are too few, but less was enough"
            continue
        assert within.estimate(chosen).total + 1000 <= budget
        if before is not None:
            assert rank(chosen) <= rank(before)
        before = chosen
        seen.add(rank(chosen))
    assert before is not None and before.micro_batches == (8,)
    assert len(seen) >= 4, f"the budgets above tell too few plans apart: {seen}"


def test_a_tight_budget_is_met_with_blocks(analysis: Analysis) -> None:
    """Many tokens and few layers at once: checkpoints are what is large."""
    generous = planner(analysis)
    smallest_k1 = generous.estimate(plan(analysis, batch=64, micro_batch_size=1)).total
    chosen = planner(analysis, smallest_k1 - 1).plan(64, LENGTH)
    assert chosen.checkpoint_interval > 1


def test_memory_to_spare_keeps_the_residuals_of_as_many_last_layers_as_it_holds(analysis: Analysis) -> None:
    """And leaves room for the checkpoints of a second forward, which keeps none."""
    lean = plan(analysis, micro_batch_size=8)
    needs = [planner(analysis).estimate(replace(lean, saved_layers=saved)).total
             for saved in range(DEPTH + 1)]
    spare = planner(analysis).estimate(lean).checkpoints
    for saved, need in enumerate(needs):
        exact = planner(analysis, need + spare).plan(8, LENGTH)
        less = planner(analysis, need + spare - 1).plan(8, LENGTH)
        assert exact.micro_batches == less.micro_batches == lean.micro_batches
        assert (exact.saved_layers, less.saved_layers) == (saved, max(0, saved - 1))
    assert planner(analysis, needs[-1] + spare, saved_layers=1).plan(8, LENGTH).saved_layers == 1
    assert planner(analysis, needs[-1] + spare).plan(8, LENGTH, training=False).saved_layers == 0


def test_given_choices_are_kept(analysis: Analysis) -> None:
    chosen = planner(analysis, checkpoint_interval=3, micro_batch_size=3, weight_slots=5, saved_layers=2,
                     gradient_slots=4).plan(8, LENGTH)
    assert chosen == Plan(8, LENGTH, (3, 3, 2), 3, 2, 5, 4)


@pytest.mark.parametrize("training", [True, False])
def test_too_little_memory_is_refused_with_what_is_needed(analysis: Analysis, training: bool) -> None:
    """Needed is exactly what would have been enough."""
    with pytest.raises(InsufficientMemoryError) as caught:
        planner(analysis, 12345, margin=100).plan(8, LENGTH, training)
    poor = planner(analysis, 12345)
    needed = min(poor.estimate(c, training).total for c in poor._candidates(8, LENGTH)) + 100
    assert planner(analysis, needed, margin=100).plan(8, LENGTH, training)
    with pytest.raises(InsufficientMemoryError):
        planner(analysis, needed - 1, margin=100).plan(8, LENGTH, training)
    first_line = str(caught.value).splitlines()[0]
    assert f"8 x {LENGTH} needs {format_bytes(needed)}" in first_line
    assert f"{format_bytes(12345)} are available" in first_line
    assert re.search(r"micro-batches of \d, checkpoint_interval=\d.* use fewer or shorter sequences", first_line)


def test_a_loss_that_cannot_be_split_is_not_split(analysis: Analysis) -> None:
    captured, tiling = analysis
    whole = replace(captured, count_targets=None)
    least = planner(analysis).estimate(plan(analysis, micro_batch_size=8)).total
    assert planner((whole, tiling)).plan(8, LENGTH).micro_batches == (8,)
    with pytest.raises(InsufficientMemoryError):
        planner((whole, tiling), budget=least // 2).plan(8, LENGTH)


def test_what_is_pinned_is_within_its_budget(analysis: Analysis) -> None:
    """Tiles are pinned where they fit, with a slab for gradients that are added to; else as many slabs as fit."""
    _, tiling = analysis
    layouts, boundary = tiling.layouts.values(), tiling.boundary()
    tiles = sum(x.weight_bytes + x.gradient_bytes for x in layouts)
    layer, edge = (max(x.gradient_bytes for x in layouts if (x.name in boundary) == inside) for inside in (False, True))
    slab = max(x.weight_bytes for x in layouts if x.name not in boundary)
    edges = edge + max(x.weight_bytes for x in layouts if x.name in boundary)

    def spent(budget: int | None) -> tuple[bool, int, int]:
        chosen = Planner(*analysis, StreamConfig.of(device="cpu"), 2**40, budget, 0).plan(8, LENGTH)
        return chosen.pinned, chosen.staging_slabs, chosen.gradient_slabs

    assert spent(None) == spent(tiles + edge + 12 * layer) == (True, 2, 12)
    assert spent(tiles + edge + layer) == (True, 2, 1)
    assert not spent(tiles + edge + layer - 1)[0]
    assert spent(edges + 2 * slab + 2 * layer) == (False, 2, 2)
    assert spent(edges + 2 * slab + layer - 1) == (False, 1, 1)
    assert spent(edges + slab + layer) == (False, 1, 1)
    with pytest.raises(InsufficientMemoryError, match="of pinned memory, and pinned_memory is"):
        spent(edges + slab + layer - 1)


@pytest.mark.parametrize("staging", [1, 2])
def test_slabs_take_no_more_than_the_budget_of_pinned_memory(staging: int) -> None:
    _, tiling = api.analyse(tiny_models.build(), StreamConfig.of(device="cpu"), "cpu", None, None)
    boundary = tiling.boundary()
    edges, layers = ([x for x in tiling.layouts.values() if (x.name in boundary) == inside] for inside in (True, False))
    least = sum(max(x.weight_bytes for x in tiles) + max(x.gradient_bytes for x in tiles) for tiles in (edges, layers))
    least += (staging - 1) * max(x.weight_bytes for x in layers)
    model = megacompile.stream(tiny_models.build(), device="cpu", pinned_memory=least)
    try:
        for _ in range(2):  # the second adds to gradients
            model(**tiny_models.batch()).loss.backward()
        assert model.megacompile.plan.staging_slabs == staging and not model.megacompile.plan.pinned
        assert 0 < model.megacompile.stats["slab_bytes"] <= least
    finally:
        model.megacompile.close()


# ---- models that share a device --------------------------------------------------------------------------------------


def test_models_on_one_device_share_what_was_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first plan that is made has what it takes; a later one is told what is left, until the first model is closed."""
    monkeypatch.setattr(ThreadBackend, "free_bytes", lambda self: 3 * 2**20)
    monkeypatch.setattr(executables, "_live", weakref.WeakSet())  # models of other tests
    first, second = (megacompile.stream(tiny_models.build(), device="cpu") for _ in range(2))
    small, large = tiny_models.batch(), tiny_models.batch(rows=8, length=64)
    try:
        budget = engine.planner(second).device_bytes
        first(**large)
        taken = first.megacompile.compiled().estimate.total
        assert engine.planner(second).device_bytes == budget - taken
        second(**small)
        whole = engine.planner(second).budget_bytes
        engine.captures(second).plan_with(budget_bytes=taken + 1000)
        with pytest.raises(InsufficientMemoryError, match=r"1000 B are available \(other streamed models have planned"):
            second(**tiny_models.batch(rows=2, length=5))
        engine.captures(second).plan_with(budget_bytes=whole)
        first.megacompile.close()
        assert engine.planner(second).device_bytes == budget
    finally:
        second.megacompile.close()


def test_slots_of_other_shapes_go_where_other_models_have_planned_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadBackend, "free_bytes", lambda self: 3 * 2**20)
    monkeypatch.setattr(executables, "_live", weakref.WeakSet())  # models of other tests
    first, second = (megacompile.stream(tiny_models.build(), device="cpu") for _ in range(2))
    small = tiny_models.batch()
    try:
        executable = second.megacompile.compiled(small)
        left = bytes(1000)
        engine.arena(second).slots["W9"] = torch.frombuffer(bytearray(left), dtype=torch.uint8)
        taken = executable.estimate.total + engine.planner(second).margin_bytes
        engine.captures(second).plan_with(budget_bytes=taken + len(left))
        assert engine.residency(second).surplus(executable) == []
        first(**small)
        assert engine.residency(second).surplus(executable) == ["W9"]
    finally:
        for model in (first, second):
            model.megacompile.close()


def test_a_model_streamed_beside_a_running_one_does_not_count_its_slots_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executables, "_live", weakref.WeakSet())
    first = megacompile.stream(tiny_models.build(), device="cpu")
    first(**tiny_models.batch())
    second = megacompile.stream(tiny_models.build(), device="cpu")
    needed = first.megacompile.compiled().estimate
    taken = engine.planner(second).taken_bytes
    assert taken == needed.total - needed.slots
    for model in (first, second):
        model.megacompile.close()


# ---- host memory -----------------------------------------------------------------------------------------------------

GROUPS = {
    "none": ({}, 1000 * 1024),
    "version 2, unlimited": (
        {"job/memory.max": "max", "job/memory.current": "1", "job/memory.stat": "inactive_file 0"}, 1024000),
    "version 2": (
        {"job/memory.max": "5000", "job/memory.current": "3000", "job/memory.stat": "anon 9\ninactive_file 400"}, 2400),
    "version 2, of a group around": (
        {"job/memory.max": "9000", "job/memory.current": "3000", "job/memory.stat": "inactive_file 0",
         "memory.max": "4000", "memory.current": "3500", "memory.stat": "inactive_file 0"}, 500),
    "version 2, held up before its limit": (
        {"job/memory.max": "9000", "job/memory.high": "3500", "job/memory.current": "3000",
         "job/memory.stat": "inactive_file 0"}, 500),
    "version 1": (
        {"memory/step/memory.limit_in_bytes": "5000", "memory/step/memory.usage_in_bytes": "4900",
         "memory/step/memory.stat": "inactive_file 7\ntotal_inactive_file 50"}, 150),
}


LIMITS = ("max", "high", "limit_in_bytes")


@pytest.mark.parametrize("which", GROUPS)
def test_host_memory_is_no_more_than_a_container_allows(which: str, tmp_path: Path) -> None:
    files, expected = GROUPS[which]
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 1000 kB\n")
    (proc / "self/cgroup").write_text("4:memory:/step\n1:cpu:/\n0::/job\n")
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text + "\n")
    assert available_host_bytes(proc, groups) == expected
    limits = [int(text) for name, text in files.items() if name.rpartition(".")[2] in LIMITS and text != "max"]
    assert min(host_bytes(proc, groups), 1 << 32) == min([*limits, 1 << 32])


def test_attention_s_results_alone_are_kept_by_more_layers_and_in_blocks_of_one(analysis: Analysis) -> None:
    lean = planner(analysis, saved_layers=0).plan(8, LENGTH)
    spare = planner(analysis).estimate(lean).checkpoints
    budget = planner(analysis).estimate(replace(lean, saved_layers=3)).total + spare
    whole, alone = (planner(analysis, budget, micro_batch_size=8, residuals=kind).plan(8, LENGTH) for kind in RESIDUALS)
    assert (whole.residuals, alone.residuals) == RESIDUALS and alone.saved_layers > whole.saved_layers == 3
    assert {plan.checkpoint_interval for plan in planner(analysis, residuals="attention")._candidates(8, LENGTH)} == {1}
    with pytest.raises(MegacompileError, match="needs checkpoint_interval=1: a block of several"):
        planner(analysis, residuals="attention", checkpoint_interval=2).plan(8, LENGTH)
    with pytest.raises(MegacompileError, match="needs checkpoint_interval=1: a block of several"):
        replace(alone, checkpoint_interval=2)  # which no options were asked for
    with pytest.raises(MegacompileError, match="residuals must be one of all, attention, not 'some'"):
        StreamConfig(residuals="some")


@pytest.mark.parametrize("whole_step", [False, True])
@pytest.mark.parametrize(("given", "also"), [({}, True), ({"residuals": "all"}, False), ({"saved_layers": 3}, False),
                                             ({"checkpoint_interval": 2}, False)], ids=str)
def test_attention_s_results_alone_are_an_alternative_where_not_all_residuals_fit(
        given: dict[str, Any], also: bool, whole_step: bool, analysis: Analysis) -> None:
    lean = planner(analysis, saved_layers=0).plan(8, LENGTH)
    budget = planner(analysis).estimate(replace(lean, saved_layers=3)).total
    measured: Any = object()  # there is a simulator, which is not used
    tight = replace(planner(analysis, budget, micro_batch_size=8, **given), simulator=measured)
    found = [*tight.considered(8, LENGTH, whole_step=whole_step)]
    assert any(plan.residuals == "all" for plan in found)
    assert any(plan.residuals == "attention" for plan in found) is also
    assert all(plan.saved_layers for plan in found if plan.residuals == "attention")
    kept_on_host = [(plan, tuple(plan.from_host(tight.layers))) for plan in found if plan.residuals == "attention"]
    assert len({(plan.waves, plan.saved_layers, on_host) for plan, on_host in kept_on_host}) == len(kept_on_host), "twice"
    unmeasured = replace(tight, simulator=None).considered(8, LENGTH, whole_step=whole_step)
    roomy = replace(tight, budget_bytes=2**40).considered(8, LENGTH, whole_step=whole_step)
    assert {plan.residuals for plan in (*unmeasured, *roomy)} == {"all"}, "unknown, or nothing to gain"


def test_named_tiles_are_planned_for_once(analysis: Analysis) -> None:
    measured: Any = object()
    named = planner(analysis, resident_state=("model.layers.0", "model.layers.1"))
    assert replace(named, simulator=measured, stateful=named.resident_state())._state_counts(training=True) == [0]


@pytest.mark.parametrize("more", range(0, 40, 4))
def test_a_second_open_forward_fits_beside_attention_s_results(more: int, analysis: Analysis) -> None:
    """Whose own checkpoints are on the device, or go to the host as the plan says: through slots that the plan may not have."""
    lean = planner(analysis, saved_layers=0).plan(8, LENGTH)
    budget = planner(analysis).estimate(lean).total * (100 + more) // 100
    measured: Any = object()
    tight = replace(planner(analysis, budget, micro_batch_size=8), simulator=measured)
    for plan in tight.considered(8, LENGTH):
        if plan.residuals == "attention":
            needed, second = (tight.estimate(replace(plan, saved_layers=saved)) for saved in (plan.saved_layers, 0))
            slots = max(0, second.slots - needed.slots)
            assert needed.total + second.checkpoints + slots <= budget


# ---- where little fits -----------------------------------------------------------------------------------------------


def test_where_nothing_else_fits_gradients_have_one_slot_and_then_weights(analysis: Analysis) -> None:
    def least(**options: Any) -> int:
        poor = planner(analysis, 12345, **options)
        return min(poor.estimate(each).total for each in poor._candidates(8, LENGTH))

    def slots(budget: int, **options: Any) -> tuple[int, int]:
        chosen = planner(analysis, budget, **whole, **options).choose(8, LENGTH).plan
        return chosen.weight_slots, chosen.gradient_slots

    whole: dict[str, Any] = {"checkpoint_interval": 1}  # blocks of several layers are another way out
    usual, gradients, both = (least(**whole, **more) for more in (
        {}, {"gradient_slots": 1}, {"gradient_slots": 1, "weight_slots": 1}))
    assert both < gradients < usual
    assert (slots(usual), slots(usual - 1), slots(gradients - 1), slots(both)) == ((2, 2), (2, 1), (1, 1), (1, 1))
    assert slots(least(**whole, weight_slots=1), weight_slots=1, gradient_slots=2) == (1, 2), "named ones stay"
    assert {each.checkpoint_interval for each in planner(analysis, weight_slots=1)._candidates(8, LENGTH)} == {1}
    single = least(**whole, weight_slots=1)
    for options, budget in (({}, both), ({"gradient_slots": 2}, single), ({"weight_slots": 2}, gradients)):
        with pytest.raises(InsufficientMemoryError):
            slots(budget - 1, **options)


def test_a_refusal_names_the_smallest_plan_and_what_would_fit(analysis: Analysis) -> None:
    """Each batch and option that it names fits, and no larger batch does."""
    leanest = planner(analysis, 12345, gradient_slots=1, weight_slots=1)
    least = min(leanest.estimate(each).total for each in leanest._candidates(8, LENGTH))
    poor = planner(analysis, least - 1)
    with pytest.raises(InsufficientMemoryError, match="weight_slots=1, gradient_slots=1") as caught:
        poor.choose(8, LENGTH)
    said = str(caught.value)
    assert f"or a larger device_memory ({format_bytes(least)} for this smallest plan)" in said
    batches = [(int(rows), int(length)) for rows, length in re.findall(r"(\d+) x (\d+)(?= or | would fit)", said)]
    assert len(batches) == 2 and batches[0][1] == LENGTH and batches[1][0] == 8
    assert all(poor.choose(*each) for each in batches)
    with pytest.raises(InsufficientMemoryError):
        poor.choose(batches[0][0] + 1, LENGTH)
    with pytest.raises(InsufficientMemoryError, match="\nor leave out weight_slots=5"):
        planner(analysis, least, weight_slots=5).choose(8, LENGTH)


def test_where_not_even_a_token_fits_a_refusal_says_so(analysis: Analysis) -> None:
    with pytest.raises(InsufficientMemoryError, match="no shorter sequence and no smaller batch fits"):
        planner(analysis, 12345).choose(8, LENGTH)
