"""The benchmark of rows of uneven length: its data, what a row contains, and what the table compares."""
from __future__ import annotations

import gc
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import rows
import uneven
from clocks import Clock, collections, step_fields
from table import markdown
from tables import Spec, Table
from transformers import TrainerState

from megacompile import api
from megacompile.errors import MegacompileError
from megacompile.frontend.capture import capture
from megacompile.losses import IGNORED

TINY = ["--shape", "tiny", "--layers", "2", "--batch", "6", "--steps", "2", "--warm-up", "1", "--device", "cpu",
        "--logging-steps", "1"]


def row_of(*arguments: str, models: uneven.Models | None = None) -> dict[str, Any]:
    return dict(rows.finished(uneven.measure(uneven.options().parse_args([*TINY, *arguments]), models or uneven.Models())))


@pytest.mark.nightly(held_by=("tests/system/test_bench_uneven.py::test_other_ways_to_train_give_rows_too",
                              "tests/system/test_uneven_rows.py::test_thirty_steps_of_random_lengths_need_four_sizes_of_"
                              "micro_batches_and_one_plan"))
def test_all_trainers_see_the_same_rows_and_count_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "capture", capture)  # tests share captures; a row says how long its own took
    ours, native = row_of(), row_of("--through", "native", "--micro-batch-size", "2")
    assert ours["losses"] == pytest.approx(native["losses"], rel=1e-3)
    assert ours["tokens_per_step"] == native["tokens_per_step"] and 0 < native["padding"] < ours["padding"] < 1
    assert len(ours["times_s"]) == len(ours["losses"]) == 3 and ours["first_step_s"] == pytest.approx(
        ours["times_s"][0], abs=0.01)
    assert ours["tflops"] == pytest.approx(6 * ours["parameters"] * ours["tokens_per_s"] / 1e12, rel=0.01)
    assert sum(ours["useful_tokens"]) == ours["stats"]["useful_tokens"] == sum(native["useful_tokens"])
    assert sum(ours["computed_tokens"]) == ours["stats"]["computed_tokens"] < sum(native["computed_tokens"])
    assert any("tracing" in task for task, _ in ours["preparing_s"])
    assert any("planning" in task for task, _ in ours["training_s"])
    json.dumps(ours)


@pytest.mark.nightly(held_by="tests/system/test_bench_uneven.py::test_the_steps_between_two_logs_of_trainer_are_timed_together")
def test_steps_that_are_not_logged_count_as_much_as_others() -> None:
    each, together = row_of(), row_of("--logging-steps", "5")
    assert each["steps_timed"] == [1, 1, 1] and together["steps_timed"] == [1, 2]
    assert together["computed_tokens"] == [each["computed_tokens"][0], round(statistics.mean(each["computed_tokens"][1:]))]


@pytest.mark.nightly(held_by="tests/system/test_bench_uneven.py::test_other_ways_to_train_give_rows_too")
def test_rows_that_differ_in_data_trainer_and_budget_share_a_model_and_count_their_own_tokens() -> None:
    with uneven.Models() as models:
        first, second = row_of(models=models), row_of("--device-memory", "1GiB", models=models)
        full = row_of("--through", "loop", "--data", "full", "--batch", "64", models=models)
        assert [row["rows_of_the_model"] for row in (first, second, full)] == [1, 2, 3]
        assert first["useful_tokens"] == second["useful_tokens"] and first["computed_tokens"] == second["computed_tokens"]
        assert full["padding"] == 0 and full["useful_tokens"] == full["computed_tokens"]
        model = models.model
        row_of("--through", "native", models=models)
        assert models.model is None, "native training needs the memory"
        assert row_of(models=models)["losses"] == first["losses"] and models.model is not model


@pytest.mark.parametrize("way", ["loop", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("sft", "train"))])
def test_other_ways_to_train_give_rows_too(way: str) -> None:
    row = row_of("--through", way)
    lengths = uneven.DATA["instructions"].draw(2 * 6 * 4, seed=0)
    assert len(row["losses"]) == 3 and row["tokens_per_s"] > 0
    assert 6 * min(lengths) < row["tokens_per_step"] < 6 * statistics.mean(lengths) * 2


@pytest.mark.parametrize("name", [name for name, kind in uneven.DATA.items() if isinstance(kind, uneven.Lengths)])
def test_lengths_are_drawn_as_declared_and_the_same_for_the_same_seed(name: str) -> None:
    kind = uneven.DATA[name]
    assert isinstance(kind, uneven.Lengths)
    lengths = kind.draw(4000, seed=1)
    assert statistics.median(lengths) == pytest.approx(kind.median, rel=0.1)
    assert kind.shortest <= min(lengths) < max(lengths) <= kind.longest
    assert lengths == kind.draw(4000, seed=1) != kind.draw(4000, seed=2)


def test_a_mixture_has_its_share_of_each_kind_of_lengths() -> None:
    short, long = uneven.Lengths(100, 0.1, 50, 200), uneven.Lengths(1000, 0.1, 500, 2000)
    mixture = uneven.Mixture(short, long, 0.25)
    lengths = mixture.draw(4000, seed=1)
    assert sum(length >= 500 for length in lengths) / 4000 == pytest.approx(0.25, abs=0.03)
    assert {50 <= length <= 200 or 500 <= length <= 2000 for length in lengths} == {True}
    assert lengths == mixture.draw(4000, seed=1) != mixture.draw(4000, seed=2)


def test_packed_rows_hold_every_token_once_and_no_target_across_sequences() -> None:
    source = uneven.RandomRows([5, 3, 7, 2, 8], 50)
    packed = uneven.PackedRows(source, 8)
    found = [packed[index] for index in range(len(packed))]
    assert [row["tokens"] for row in found] == [8, 7, 2, 8]
    assert all(len(row[name]) == 8 for row in found for name in ("input_ids", "labels", "position_ids"))
    assert found[0]["position_ids"] == [0, 1, 2, 3, 4, 0, 1, 2]
    assert found[0]["input_ids"] == source[0]["input_ids"] + source[1]["input_ids"]
    assert [place for place, label in enumerate(found[0]["labels"]) if label == IGNORED] == [0, 5]
    assert found[1]["labels"][7] == IGNORED


def test_full_rows_have_about_as_many_tokens_a_step_as_instructions() -> None:
    fed = uneven.feed(uneven.options().parse_args(["--data", "full", "--batch", "64"]), 50)
    assert fed.rows == 8 and set(fed.data.lengths) == {2048}  # type: ignore[union-attr]
    with pytest.raises(MegacompileError, match="cannot be arranged in another way: leave --arrangement out"):
        row_of("--data", "full", "--arrangement", "packed")
    with pytest.raises(MegacompileError, match="packs rows itself: leave --arrangement out"):
        row_of("--through", "train", "--arrangement", "packed")


def test_the_table_sets_uneven_rows_beside_full_ones_and_the_best_native_one() -> None:
    specs = (Spec("uneven", dict(data="full")), Spec("uneven", dict(data="chat")),
             Spec("uneven", dict(data="chat", through="native")))
    alike = dict(system="uneven", device="d", commit="c", shape="s", layers=8, batch=64, length=1024)
    found = [dict(alike, options=spec.identifying(), tflops=tflops, tokens_per_s=tflops * 10)
             for spec, tflops in zip(specs, (200.0, 180.0, 45.0), strict=True)]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]]
             for line in markdown(Table("t", specs), found).splitlines() if line.startswith("|")]
    header, _, full, chat, native = lines
    at = {name: header.index(name) for name in ("of full rows", "of native", "tokens/s")}
    assert [chat[at[name]] for name in at] == ["0.900", "4.000", "1,800"]
    assert full[at["of full rows"]] == "" and native[at["of native"]] == ""


def test_the_command_line_trains_on_conversations_with_as_many_tokens() -> None:
    tokens = uneven.number_tokenizer(512).apply_chat_template(
        [{"role": "user", "content": "12 5 7"}, {"role": "assistant", "content": "100 508"}], tokenize=True)["input_ids"]
    assert tokens == [12, 5, 7, 100, 508]


def test_a_slow_step_is_told_from_a_long_one() -> None:
    times, computed = [9.0, 1.0, 1.0, 2.0, 1.0, 1.5], [10, 10, 10, 20, 10, 10]
    row = step_fields(1, times, computed, computed)
    assert (row["step_s"], row["first_step_s"]) == (1.0, 9.0)
    assert (row["slowest_over_median"], row["slowest_over_median_by_token"]) == (2.0, 1.5)


def test_the_steps_between_two_logs_of_trainer_are_timed_together() -> None:
    sums = iter([30, 70, 90])
    clock, state = Clock(computed=lambda: next(sums)), TrainerState()
    clock.on_train_begin()
    for step, logs in ((1, {"loss": 1.0}), (1, {"eval_loss": 1.0}), (5, {"loss": 1.0}), (6, {"loss": 1.0})):
        state.global_step = step
        clock.on_log(None, state, logs=logs)
    assert clock.steps == [1, 4, 1] and clock.tokens == [30, 10, 20]
    whole = [seconds * count for seconds, count in zip(clock.times, clock.steps, strict=True)]
    assert sum(whole) == pytest.approx(clock.ends[-1])
    assert clock.averages([9, 1, 2, 3, 2, 7, 8]) == [9, 2, 7]
    assert [clock.warm_up(steps) for steps in (0, 1, 2, 5, 6)] == [0, 1, 2, 2, 3]


def test_the_steps_of_a_loop_are_timed_one_by_one() -> None:
    clock = Clock()
    clock.begin()
    for _ in range(3):
        clock.tick()
    assert clock.steps == [1, 1, 1]


def test_full_collections_are_timed() -> None:
    with collections() as found:
        gc.collect(0)
        gc.collect()
    assert len(found) == 1 and found[0][1] > 0
    gc.collect()
    assert len(found) == 1


def test_a_cold_run_begins_with_an_empty_cache(tmp_path: Path) -> None:
    with pytest.raises(MegacompileError, match="--cold needs an empty cache: give another --cache"):
        row_of("--cold", "--cache", str(tmp_path))
