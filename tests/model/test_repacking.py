"""Rows of uneven length share rows of one length: exactly the padded batch's training, in few shapes."""
from __future__ import annotations

import copy
import math
import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import engine
import pytest
import tiny_models
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig
from uneven import DATA

import megacompile
from megacompile.errors import InsufficientMemoryError
from megacompile.inputs.packed_layout import LENGTH, SHARES, Span, lay_out, spans_of
from megacompile.ir.placement import Placements, Updated
from megacompile.ir.plan import BatchSpec, CaptureKey, Plan
from megacompile.planning.config import StreamConfig
from megacompile.planning.packed_plans import PackedPlans, derived
from megacompile.planning.planner import Choice
from megacompile.planning.step_time import simulator_of
from megacompile.predict.hardware import Hardware
from megacompile.streaming.programs import executables
from megacompile.system.progress import work_done

LONGEST = 23


@st.composite
def spans(draw: st.DrawFn) -> tuple[list[Span], tuple[int, int]]:
    """Sequences of a batch, one in a row, with padding on either side, some rows without any; and the batch's size."""
    rows, length = draw(st.integers(1, 17)), draw(st.integers(1, 200))
    found = []
    for row in range(rows):
        start = draw(st.integers(0, length - 1))
        stop = draw(st.integers(start, length))
        if stop > start:
            found.append(Span(row, start, stop, start))
    return found or [Span(0, 0, 1, 0)], (rows, length)


@settings(max_examples=100)
@given(spans(), st.sampled_from([64, 128, LENGTH]), st.sampled_from([(), SHARES]))
def test_every_token_is_laid_out_once_and_sequences_stay_apart(
        case: tuple[list[Span], tuple[int, int]], least: int, shares: tuple[Fraction, ...]) -> None:
    given_spans, size = case
    layout = lay_out(given_spans, size, least, shares)
    places = layout.source[layout.source >= 0]
    expected = torch.cat([torch.arange(s.start, s.stop) + s.row * size[1] for s in given_spans])
    assert torch.equal(places.sort().values, expected.sort().values)
    # Sequences as a model tells them: where a position does not go on from the one before.
    follows = layout.positions[:, 1:] == layout.positions[:, :-1] + 1
    together = follows & (layout.source[:, 1:] >= 0) & (layout.source[:, :-1] >= 0)
    assert bool((layout.source[:, 1:][together] == layout.source[:, :-1][together] + 1).all()), "two sequences seem to be one"
    begins = layout.source[layout.begins]
    assert sorted(begins.tolist()) == sorted(s.row * size[1] + s.start for s in given_spans)
    assert not bool((follows & layout.begins[:, 1:]).any())
    inside = (layout.source >= 0) & ~layout.begins
    assert bool(follows[inside[:, 1:]].all()) and not bool(inside[:, 0].any()), "a sequence is torn"


@settings(max_examples=50)
@given(st.lists(st.integers(1, 700), min_size=1, max_size=64))
def test_shorter_rows_save_slots_and_have_one_of_few_lengths(lengths: list[int]) -> None:
    usual, shorter = (lay_out([Span(row, 0, count, 0) for row, count in enumerate(lengths)], (len(lengths), max(lengths)),
                              shares=shares) for shares in ((), SHARES))
    length = usual.source.shape[1]
    assert shorter.source.shape[1] in {length * sixteenths // 16 for sixteenths in range(12, 17)}
    assert shorter.source.shape == usual.source.shape or shorter.source.numel() <= usual.source.numel() * 31 / 32
    assert shorter.source.shape[1] % 32 == 0


def test_steps_of_typical_lengths_fill_shorter_rows_better_in_few_sizes() -> None:
    drawn = DATA["instructions"].draw(64 * 100, seed=3)
    batches = [drawn[at:at + 64] for at in range(0, len(drawn), 64)]
    usual, shorter = ([lay_out([Span(row, 0, count, 0) for row, count in enumerate(each)], (64, max(each)), shares=shares)
                       for each in batches] for shares in ((), SHARES))
    filled = [sum(drawn) / sum(layout.source.numel() for layout in layouts) for layouts in (usual, shorter)]
    assert filled[0] < 0.94 and filled[1] > 0.965
    assert len({layout.source.shape for layout in shorter}) <= 14


@settings(max_examples=50)
@given(spans())
def test_what_is_packed_comes_back_to_its_place(case: tuple[list[Span], tuple[int, int]]) -> None:
    given_spans, size = case
    layout = lay_out(given_spans, size)
    present = torch.zeros(size, dtype=torch.bool)
    for span in given_spans:
        present[span.row, span.start:span.stop] = True
    values = torch.randn(*size, 3).masked_fill(~present[..., None], 0.0)
    assert torch.equal(layout.unpack(layout.pack(values)), values)
    assert spans_of(present.numpy(), None, sequences=False) == given_spans or not present.any()


@settings(max_examples=50)
@given(spans(), st.integers(1, 4))
def test_parts_of_a_layout_have_its_sequences_and_as_many_rows(case: tuple[list[Span], tuple[int, int]], count: int) -> None:
    given_spans, size = case
    whole = lay_out(given_spans, size, 64, parts=count)
    parts = [whole.part(number, count) for number in range(count)]
    assert len({part.source.shape for part in parts}) == 1
    assert torch.equal(torch.cat([part.source for part in parts]), whole.source)
    found = [(span.tokens, span.position) for part in parts for span in part.spans]
    assert sorted(found) == sorted((span.tokens, span.position) for span in given_spans)


def test_rows_of_several_ranks_leave_little_unused_if_they_are_packed_together() -> None:
    """Each with 64 instructions: packed apart, every rank has as many rows as the one with the most."""
    apart, together = [], []
    for seed in range(20):
        ranks = [[Span(row, 0, tokens, 0) for row, tokens in enumerate(DATA["instructions"].draw(64, seed=2 * seed + rank))]
                 for rank in range(2)]
        tokens = sum(span.tokens for rank in ranks for span in rank)
        longest = max(span.tokens for rank in ranks for span in rank)
        apart.append(tokens / (2 * max(lay_out(rank, (64, longest)).source.numel() for rank in ranks)))
        both = [replace(span, row=span.row + 64 * number) for number, rank in enumerate(ranks) for span in rank]
        together.append(tokens / lay_out(both, (128, longest), shares=SHARES, parts=2).source.numel())
    assert sum(together) / 20 > 0.95 > 0.9 > sum(apart) / 20


def test_rows_of_instructions_leave_little_unused() -> None:
    """64 rows of log-normal lengths, as instructions have: at most one row more than their tokens need."""
    for seed in range(20):
        lengths = torch.empty(64).log_normal_(5.19, 0.8, generator=torch.Generator().manual_seed(seed)).clamp(16, 2048).long()
        layout = lay_out([Span(row, 0, n, 0) for row, n in enumerate(lengths.tolist())], (64, 2048))
        assert layout.source.shape[1] == LENGTH
        assert layout.source.shape[0] <= -(-int(lengths.sum()) // LENGTH) + 1


def test_positions_that_would_go_on_with_another_sequence_are_kept_apart() -> None:
    layout = lay_out([Span(0, 0, 5, 0), Span(1, 5, 9, 5)], (2, 9))
    packed = layout.source[0, :10].tolist()
    assert packed == [0, 1, 2, 3, 4, -1, 14, 15, 16, 17]
    assert layout.positions[0, :10].tolist() == [0, 1, 2, 3, 4, 5, 5, 6, 7, 8]


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Tensor]:
    """Padded rows of random lengths with labels, some of them ignored."""
    rows = draw(st.integers(1, 17))
    lengths = torch.tensor(draw(st.lists(st.integers(1, LONGEST), min_size=rows, max_size=rows)))
    lengths[draw(st.integers(0, rows - 1))] = LONGEST
    ids = tiny_models.batch(draw(st.integers(0, 99)), rows=rows, length=LONGEST)["input_ids"]
    mask = (torch.arange(LONGEST) < lengths[:, None]).long()
    if draw(st.booleans()):
        mask = mask.flip(1)
    labels = ids.masked_fill(mask == 0, -100)
    if draw(st.booleans()):  # as where prompts are not trained on
        labels[torch.arange(rows), mask.argmax(1)] = -100
    if not bool((labels[:, 1:] != -100).any()):
        labels[0] = ids[0]
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def assert_trains_alike(batch: dict[str, Tensor], model: Any, native: Any) -> None:
    """The loss of native PyTorch, and its gradients."""
    loss, expected = model(**batch).loss, native(**batch, use_cache=False).loss
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-6, atol=0)
    loss.backward()
    expected.backward()
    tiny_models.assert_same_gradients(model, native)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=batches())
def test_padded_rows_train_as_native_pytorch_trains_them(batch: dict[str, Tensor], model: Any, native: Any) -> None:
    for each in (model, native):
        each.zero_grad()
    assert_trains_alike(batch, model, native)


def padded(lengths: list[int], **changes: Any) -> dict[str, Tensor]:
    return tiny_models.right_padded(lengths, seed=7, **changes)


def test_padded_batches_of_any_length_share_few_shapes(model: Any) -> None:
    specs = {model.megacompile.compiled(padded([longest, 3, 5])).spec for longest in range(10, 40)}
    assert {(spec.batch, spec.length) for spec in specs} == {(1, 64)}
    assert all(spec.capture.further == ("position_ids",) for spec in specs)


def test_rows_that_fill_their_batch_are_left_as_they_are(model: Any) -> None:
    spec = model.megacompile.compiled(padded([9, 9, 9])).spec
    assert (spec.batch, spec.length, spec.capture.further) == (3, 9, ())


def test_padding_that_only_labels_show_is_left_out_of_training(model: Any) -> None:
    batch = padded([20, 4, 2])
    del batch["attention_mask"]
    assert model.megacompile.compiled(batch).spec.length == 64
    with torch.no_grad():  # logits of all places are asked for
        assert model(**batch).logits.shape == (3, 20, tiny_models.VOCABULARY)


@pytest.mark.parametrize("why", ["holes", "a first token in left padding that is a target",
                                 pytest.param("a mask of pairs", marks=pytest.mark.nightly)])
def test_what_cannot_be_packed_is_computed_with_its_padding(why: str, model: Any, native: Any) -> None:
    batch = padded([12, 5, 7])
    if why == "holes":
        batch["attention_mask"][0, 4] = 0
    elif why.startswith("a first token"):
        batch = {name: tensor.flip(1) for name, tensor in batch.items()}
    else:
        seen = torch.ones(12, 12, dtype=torch.bool).tril() & (batch["attention_mask"][:, None, None] > 0)
        batch["attention_mask"] = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    spec = model.megacompile.compiled(batch).spec
    assert (spec.batch, spec.length) == (3, 128 if why == "holes" else 12)
    loss, expected = model(**batch).loss, native(**batch, use_cache=False).loss
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("lengths", [[12, 0, 5], [12, 1, 1]], ids=["an empty row", "rows without a target"])
def test_rows_that_add_nothing_to_the_loss_are_exact(lengths: list[int], model: Any, native: Any) -> None:
    batch = padded(lengths)
    assert_trains_alike(batch, model, native)


def test_packed_rows_of_no_fixed_shape_are_laid_out_anew(model: Any, native: Any) -> None:
    """As collators give them that join a batch to one row: another length each time."""
    positions = torch.cat([torch.arange(n) for n in (9, 4, 20)])[None]
    ids = tiny_models.batch(3, rows=1, length=33)["input_ids"]
    batch = {"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions}
    assert model.megacompile.compiled(batch).spec.length == 64
    assert_trains_alike(batch, model, native)


def test_values_of_tokens_come_back_to_their_rows(model: Any, native: Any) -> None:
    model.eval(), native.eval()
    batch = padded([12, 5, 7])
    del batch["labels"]
    with torch.no_grad():
        expected = native(**batch, use_cache=False, output_hidden_states=True)
        found = model(**batch, output_hidden_states=True)
        real = batch["attention_mask"].bool()
        torch.testing.assert_close(found.logits[real], expected.logits[real])
        for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
            torch.testing.assert_close(ours[real], theirs[real])
        torch.testing.assert_close(model.megacompile.last_hidden_state(batch)[real], expected.hidden_states[-1][real])
    assert not bool(found.logits[~real].any()), "padding has no values"


def spec_of(rows: int, whole_step: bool) -> BatchSpec:
    return BatchSpec(rows, 2048, labels=True, training=True, whole_step=whole_step, capture=CaptureKey(("position_ids",)))


@pytest.mark.parametrize("whole_step", [False, True])
def test_a_derived_plan_keeps_every_choice_and_few_micro_batch_sizes(whole_step: bool) -> None:
    base = Plan(16, 2048, (8, 8), saved_layers=3, waves=2 if whole_step else 1,
                placements=Placements.named(("a", "b"), host_sums=("a",) if whole_step else ()))
    for rows in range(1, 40):
        for plan in derived(base, spec_of(rows, whole_step)):
            assert sum(plan.micro_batches) == rows and set(plan.micro_batches) <= {8, 4, 2, 1}
            assert replace(plan, batch=16, micro_batches=(8, 8), waves=base.waves, placements=base.placements) == base
            assert plan.placements == (base if plan.waves > 1 else base.placed(Updated.FROM_HOST_SUMS, ())).placements
            assert whole_step or plan.waves == 1, "only whole steps go in waves"
        if whole_step:  # the last one takes no more memory than the base
            assert max(len(plan.wave(wave)) for wave in range(plan.waves)) <= 1


def answered(model: Any) -> int:
    """How many plans were searched, or found in the cache."""
    stats = model.megacompile.stats
    return int(stats["plan_searches"] + stats["plans_from_cache"])


def test_plans_are_searched_once_for_steps_of_like_size(model: Any) -> None:
    before = answered(model)
    for rows in (9, 8, 10, 7, 12, 9):
        model.megacompile.compiled(padded([40] * (rows * 50) + [3]))
    assert answered(model) == before + 1


@pytest.mark.nightly(held_by="tests/model/test_repacking.py::test_plans_are_searched_once_for_steps_of_like_size")
def test_one_search_serves_packed_rows_of_all_lengths() -> None:
    model = megacompile.stream(tiny_models.build(max_position_embeddings=8192), device="cpu")
    try:
        for longest in (40, 3000, 5000, 40):
            compiled = model.megacompile.compiled(padded([longest, 3] + [40] * 400))
            assert compiled.plan.length == compiled.spec.length > longest
        assert answered(model) == 1
    finally:
        model.megacompile.close()


@pytest.mark.nightly(held_by="tests/model/test_repacking.py::test_plans_are_searched_once_for_steps_of_like_size")
def test_after_the_second_step_a_few_rows_more_or_fewer_plan_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so does a search for steps of twice the size. Programs that are made ahead are those that the step would make."""
    monkeypatch.setattr(executables, "SECONDS_AHEAD", math.inf)
    ahead, late = (megacompile.stream(tiny_models.build(max_position_embeddings=4096), device="cpu", device_memory="8GiB")
                   for _ in range(2))
    try:
        engine.executables(late).packed_steps = 2
        for model in (ahead, late):
            for rows in (12, 13):
                next_step(model, rows)
            assert model.megacompile.plan.batch == 13
        assert ahead.megacompile.stats["predicted_device_bytes"] == late.megacompile.stats["predicted_device_bytes"]
        assert answered(ahead) == answered(late) + 1, "16 rows are searched for ahead"
        count = ahead.megacompile.stats["shapes"]
        for rows in (10, 11, 14, 15, 16, 19, 9):
            with work_done() as done:
                found = ahead.megacompile.compiled(packed_into(rows))
            assert found.spec.batch == rows and not [task for task, _ in done if task.startswith("planning")]
            assert found.program.text() == late.megacompile.compiled(packed_into(rows)).program.text()
        assert ahead.megacompile.stats["shapes"] == count and answered(ahead) == answered(late)
    finally:
        ahead.megacompile.close()
        late.megacompile.close()


@pytest.mark.nightly(held_by="tests/model/test_repacking.py::test_plans_are_searched_once_for_steps_of_like_size")
def test_the_second_step_of_a_large_model_does_not_plan_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    model = megacompile.stream(tiny_models.build(max_position_embeddings=4096), device="cpu", device_memory="8GiB")
    try:
        monkeypatch.setattr(executables, "SECONDS_AHEAD", 0.0)
        for rows in (12, 13):
            model.megacompile.compiled(packed_into(rows))  # only looks
            latest = next_step(model, rows)
        assert model.megacompile.stats["shapes"] == 2
        engine.executables(model).packed_steps = 1
        monkeypatch.setattr(executables, "SECONDS_AHEAD", math.inf)
        next_step(model, 13)
        assert model.megacompile.stats["shapes"] > 6 and model.megacompile.compiled() is latest
    finally:
        model.megacompile.close()


def next_step(model: Any, rows: int) -> Any:
    """Gets the program of a training step as the step does, without running it."""
    spec = model.megacompile.compiled(packed_into(rows)).spec
    return engine.rank_group(model).compiled(engine.executables(model), spec, set())


def packed_into(rows: int) -> dict[str, Tensor]:
    """A padded batch that takes this many packed rows of the usual length."""
    return padded([LENGTH - 1] * rows + [1])


@pytest.mark.nightly(held_by="tests/model/test_repacking.py::test_a_predicted_rate_does_not_count_padding")
def test_plans_of_uneven_rows_expect_a_slower_host() -> None:
    """Their steps differ in size, and small ones hide less of the host's updates."""
    host = replace(Hardware.find("h200"), adam=2e8)
    even = megacompile.schedule(tiny_models.build(bf16=True, hidden_size=64, intermediate_size=128), batch=16, length=256,
                                hardware=host, resident_state=(), visiting_state=())
    packed = even.captured.for_key(CaptureKey(("position_ids",)))
    seconds = []
    for captured in (even.captured, packed):
        simulator = simulator_of(captured, even.tiling, host, fused=True)
        assert simulator is not None
        seconds.append(simulator.cautious_s(even.plan, False) / simulator.times(even.plan, False).step_s)
    assert 1.0 < seconds[0] < 1.1 < seconds[1] < 1.5


class Planner:
    """Plans whose every choice depends on the number of rows; those that fit have few of them in a wave."""

    stateful = None
    config = StreamConfig()

    def resident_state(self) -> tuple[str, ...]:
        return ()

    def fits(self, plan: Plan) -> bool:
        return plan.batch < 40 or plan.checkpoint_interval > 4

    def choose(self, batch: int, length: int, *_: Any) -> Choice:
        return Choice(Plan(batch, length, (8,) * (batch // 8), checkpoint_interval=batch // 8))

    def after(self, choice: Choice) -> Planner:
        return self


def test_the_plan_of_a_step_is_the_same_whatever_steps_came_before() -> None:
    """So a run that is resumed has the bits of one that was not interrupted."""
    def plans(rows: list[int]) -> dict[int, Plan]:
        packed, planner = PackedPlans(LENGTH), Planner()
        return {each: packed.choose(planner, spec_of(each, whole_step=True)).plan  # type: ignore[arg-type]
                for each in rows}

    upwards = plans([*range(1, 60)])
    assert upwards == plans([*range(59, 0, -1)]) == plans([33, 3, 8, *range(1, 60)])
    assert upwards[15].checkpoint_interval == 1 and upwards[16].checkpoint_interval == 2


class SmallDevice(Planner):
    """Plans serve a tenth more rows than they were searched for; none is found for more than `most` rows."""

    def __init__(self, most: int) -> None:
        self.most, self.searched = most, list[int]()

    def fits(self, plan: Plan) -> bool:
        return plan.batch <= 8.8 * plan.checkpoint_interval

    def choose(self, batch: int, length: int, *_: Any) -> Choice:
        self.searched.append(batch)
        if batch > self.most:
            raise InsufficientMemoryError("too many rows")
        return super().choose(batch, length)


def test_where_memory_is_short_a_plan_leaves_room_for_half_more_rows() -> None:
    """So that a step with more rows than usual does not stop training for another search."""
    packed, planner = PackedPlans(LENGTH, balanced=True), SmallDevice(most=100)
    plans = [packed.choose(planner, spec_of(rows, whole_step=True)).plan  # type: ignore[arg-type]
             for rows in (16, 22, 17, 24)]
    assert planner.searched == [16, 24] and {plan.checkpoint_interval for plan in plans} == {3}
    packed.choose(planner, spec_of(30, whole_step=True))  # type: ignore[arg-type]
    assert planner.searched == [16, 24, 32], "too many for that plan"


class OneAtATime(Planner):
    """Plans whose micro-batches have one row; all fit."""

    def __init__(self, chunk: int = 0) -> None:
        self.chunk, self.searched = chunk, list[tuple[int, int]]()

    def fits(self, plan: Plan) -> bool:
        return True

    def choose(self, batch: int, length: int, *_: Any) -> Choice:
        self.searched.append((batch, length))
        return Choice(Plan(batch, length, (1,) * batch, token_chunk=self.chunk))


@pytest.mark.parametrize(("length", "chunk", "searched"), [
    (2048, 0, [(8, 2048)]),
    (1024, 0, [(8, 2048)]),  # two rows at a time
    (1024, 512, [(8, 2048), (16, 1024)]),  # computes some tokens of each row at a time
    (8192, 0, [(8, 2048), (2, 8192)]),  # a micro-batch is shorter than such a row
    (32768, 0, [(2, 32768)])])  # longer than full micro-batches
def test_a_plan_for_usual_rows_that_cannot_serve_others_is_not_searched_for_again(
        length: int, chunk: int, searched: list[tuple[int, int]]) -> None:
    packed, planner = PackedPlans(LENGTH, balanced=True), OneAtATime(chunk)
    spec = replace(spec_of(2 if length > 8192 else 16384 // length, whole_step=True), length=length)
    plan = packed.choose(planner, spec).plan  # type: ignore[arg-type]
    assert planner.searched == searched
    assert (plan.batch, plan.length) == (spec.batch, length)
    packed.choose(planner, spec)  # type: ignore[arg-type]
    assert planner.searched == searched, "known plans serve"


def test_where_nothing_leaves_room_for_more_rows_the_plan_is_that_of_the_usual_number() -> None:
    packed, planner = PackedPlans(LENGTH, balanced=True), SmallDevice(most=20)
    plan = packed.choose(planner, spec_of(17, whole_step=True)).plan  # type: ignore[arg-type]
    assert plan.checkpoint_interval == 2 and planner.searched == [16, 24]


def test_evaluations_of_packed_rows_have_micro_batches_of_few_sizes() -> None:
    model = megacompile.stream(tiny_models.build(), device="cpu")
    try:
        found = [model.megacompile.compiled(padded([40] * (rows * 51 - 1) + [3]), training=False) for rows in (3, 5, 6, 9)]
        assert [(each.spec.length, sum(each.plan.micro_batches)) for each in found] == [
            (LENGTH, rows) for rows in (3, 5, 6, 9)]
        assert {size for each in found for size in each.plan.micro_batches} <= {1, 2, 4, 8}
    finally:
        model.megacompile.close()


@pytest.mark.nightly(held_by="tests/model/test_heads.py::test_a_loss_that_is_not_a_sum_over_rows_is_not_split")
def test_rows_whose_loss_is_not_a_sum_over_tokens_stay_in_one_micro_batch() -> None:
    """Sequences that the user has packed: routers balance the experts of a whole batch."""
    from transformers import AutoModelForCausalLM, MixtralConfig

    sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
                 num_key_value_heads=2, num_local_experts=4, pad_token_id=0, output_router_logits=True)
    native = AutoModelForCausalLM.from_config(MixtralConfig(**sizes)).train()
    model = megacompile.stream(copy.deepcopy(native), device="cpu")
    try:
        ids = tiny_models.batch(3, rows=3, length=16)["input_ids"]
        batch = {"input_ids": ids, "labels": ids, "position_ids": torch.cat([torch.arange(9), torch.arange(7)]).repeat(3, 1)}
        assert model.megacompile.compiled(batch).plan.micro_batches == (3,)
        torch.testing.assert_close(model(**batch).loss, native(**batch, use_cache=False).loss)
    finally:
        model.megacompile.close()


# ---------------------------------------------------------------- what is said of it
def said(model: Any, batch: dict[str, Tensor] | None = None) -> str:
    return str(model.megacompile.explain(batch, hardware="h200").splitlines()[0])


@pytest.mark.nightly(held_by="tests/model/test_repacking.py::test_a_batch_that_is_not_packed_is_explained_with_its_reason")
def test_a_plan_is_explained_with_how_its_rows_are_packed(model: Any) -> None:
    assert said(model, padded([20, 4, 2])) == "rows: 3 x 20 with 26 tokens, packed into 1 x 64 (41% full)"
    assert said(model) == "rows: packed into 1 x 64"
    assert said(model, padded([9, 9])) == "rows: 2 x 9, not packed: no row has padding"
    assert said(model) == f"rows: 2 x 9; padded rows are packed into rows of {LENGTH}"
    assert "padded rows: packed into rows of one length" in megacompile.explain_capture(model)


def test_a_batch_that_is_not_packed_is_explained_with_its_reason(model: Any) -> None:
    batch = padded([12, 5, 7])
    holes, left = dict(batch), {name: tensor.flip(1) for name, tensor in batch.items()}
    holes["attention_mask"] = batch["attention_mask"].clone()
    holes["attention_mask"][0, 4] = 0
    assert said(model, holes).startswith("rows: 3 x 12, padded to 3 x 128, not packed: its attention_mask has holes")
    assert said(model, left) == "rows: 3 x 12, not packed: padding on the left predicts a target"
    assert (said(model, {**batch, "labels": batch["input_ids"]})
            == "rows: 3 x 12, padded to 3 x 128, not packed: padding has labels other than -100")


def test_how_a_batch_without_labels_is_packed_is_explained_too(model: Any) -> None:
    batch = padded([20, 4, 2])
    del batch["labels"]
    left = {name: tensor.flip(1) for name, tensor in batch.items()}
    model.eval()
    assert model.megacompile.explain(batch) == "rows: 3 x 20 with 26 tokens, packed into 1 x 64 (41% full)"
    assert model.megacompile.explain(left).endswith("not packed: it is padded on the left, and values of padding may be read")


def test_a_predicted_rate_does_not_count_padding(model: Any) -> None:
    def rate(batch: dict[str, Tensor]) -> float:
        (found,) = re.findall(r"([\d,]+) (?:useful )?tokens/s", model.megacompile.explain(batch, hardware="h200"))
        return float(found.replace(",", ""))

    assert rate(padded([20, 4, 2])) == pytest.approx(26 / 64 * rate(padded([40, 24])), rel=0.001)


@pytest.mark.nightly(held_by="tests/model/test_repacking.py::test_what_cannot_be_packed_is_computed_with_its_padding")
def test_layers_that_keep_a_model_from_being_packed_are_named() -> None:
    from transformers import AutoModelForCausalLM, Lfm2Config

    sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                 num_key_value_heads=2, pad_token_id=0, layer_types=["conv", "full_attention"])
    model = megacompile.stream(AutoModelForCausalLM.from_config(Lfm2Config(**sizes)), device="cpu")
    try:
        why = "not all layers are causal attention that streaming has kernels for (model.layers.0)"
        assert said(model, padded([12, 5, 7])) == f"rows: 3 x 12, padded to 3 x 128, not packed: {why}"
        assert f"padded rows: computed with their padding, since {why}" in megacompile.explain_capture(model)
    finally:
        model.megacompile.close()


@pytest.mark.nightly(held_by="tests/model/test_repacking.py::test_a_batch_that_is_not_packed_is_explained_with_its_reason")
def test_a_model_that_shall_not_be_packed_says_so() -> None:
    model = megacompile.stream(tiny_models.build(), device="cpu", repack=False)
    try:
        assert said(model, padded([9, 3])) == "rows: 2 x 9, not packed: the model was streamed with repack=False"
    finally:
        model.megacompile.close()


@pytest.fixture(scope="module")
def across_sequences() -> tuple[Any, Any]:
    """GPT-OSS, streamed and native: it leaves position_ids out of what it says to its masks."""
    config = GptOssConfig(vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
                          num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
    torch.manual_seed(0)
    native = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return megacompile.stream(copy.deepcopy(native), device="cpu"), native


@pytest.mark.nightly(held_by=(
    "tests/model/test_repacking.py::test_padded_rows_train_as_native_pytorch_trains_them",
    "tests/model/test_repacking.py::test_positions_that_would_go_on_with_another_sequence_are_kept_apart"))
def test_rows_are_not_packed_where_attention_does_not_read_their_positions(across_sequences: tuple[Any, Any]) -> None:
    model, native = across_sequences
    ids = torch.randint(0, 97, (4, 40))
    mask = (torch.arange(40) < torch.tensor([40, 17, 33, 7])[:, None]).long()
    batch = dict(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    assert float(model(**batch).loss.detach()) == pytest.approx(float(native(**batch).loss.detach()), abs=1e-6)
    with torch.no_grad():
        assert float(model(**batch).loss) == pytest.approx(float(native(**batch).loss), abs=1e-6)
    for training in (True, False):
        assert "attention does not read position_ids (model.layers.0" in engine.captures(model).repacking.refusal(
            training)


@pytest.mark.nightly(held_by=(
    "tests/model/test_repacking.py::test_padded_rows_train_as_native_pytorch_trains_them",
    "tests/model/test_repacking.py::test_positions_that_would_go_on_with_another_sequence_are_kept_apart"))
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_positions_that_attention_does_not_read_leave_every_row_as_native(rows: int, across_sequences: tuple[Any, Any]) -> None:
    """Their segments are made of no argument of the batch, and once had one row for all: the others were not computed."""
    model, native = across_sequences
    ids = torch.randint(0, 97, (rows, 64))
    positions = torch.cat([torch.arange(30), torch.arange(34)]).repeat(rows, 1)
    batch = dict(input_ids=ids, position_ids=positions, labels=ids.masked_fill(positions == 0, -100))
    for each in (model, native):
        each.zero_grad()
        each(**batch).loss.backward()
    with torch.no_grad():
        assert float(model(**batch).loss) == pytest.approx(float(native(**batch).loss), abs=1e-6)
    for (name, parameter), other in zip(model.named_parameters(), native.parameters(), strict=True):
        assert (parameter.grad - other.grad).norm() <= 1e-5 * other.grad.norm() + 1e-7, name


@pytest.mark.nightly(held_by="tests/model/test_batch_totals.py::test_any_number_made_of_all_rows_is_that_of_the_whole_batch")
def test_rows_whose_frequencies_depend_on_the_largest_position_are_not_packed() -> None:
    """LongRoPE: in another micro-batch another position would be the largest."""
    from transformers import AutoModelForCausalLM, Phi3Config

    sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
                 num_key_value_heads=2, pad_token_id=0, max_position_embeddings=64, original_max_position_embeddings=16)
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10000.0}
    built = AutoModelForCausalLM.from_config(Phi3Config(**sizes, rope_parameters=rope))
    model = megacompile.stream(built, device="cpu")
    try:
        assert model.megacompile.compiled(padded([24, 3, 5])).spec.length == 24
    finally:
        model.megacompile.close()
