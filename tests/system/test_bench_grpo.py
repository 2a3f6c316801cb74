"""The benchmark of GRPO: what a row contains, and that its phases add up to its steps."""
from __future__ import annotations

import contextlib
import json
import time
from types import SimpleNamespace
from typing import Any

import engine
import pytest

pytest.importorskip("datasets")
pytest.importorskip("trl")

import clocks
import grpo
import rows
from clocks import PhaseClock

from megacompile.errors import MegacompileError

TINY = ["--shape", "tiny", "--layers", "2", "--prompts", "3", "--samples", "4", "--length", "8", "--new-tokens", "6",
        "--batch", "2", "--steps", "2", "--warm-up", "1", "--device", "cpu"]
#: Tokens of a step's prompts and completions.
TOKENS = 3 * 4 * (8 + 6)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def row_of(*arguments: str) -> dict[str, Any]:
    return dict(rows.finished(grpo.measure(grpo.options().parse_args([*TINY, *arguments]))))


@pytest.mark.nightly(held_by=(
    "tests/system/test_bench_grpo.py::test_a_phase_pauses_the_one_around_it_and_counts_the_work_that_it_issued",
    "tests/system/test_preference.py::test_online_trainers_sample_and_train_as_they_do_unstreamed"))
@pytest.mark.parametrize(("arguments", "iterations", "computed", "turns"), [
    ([], 1, False, 0), (["--through", "turns", "--iterations", "2", "--accumulation", "2"], 2, True, 2),
    (["--overlap"], 1, False, 0), (["--beta", "0.1", "--no-clipping"], 1, True, 0)], ids=str)
def test_phases_of_grpo_add_up_to_its_steps(arguments: list[str], iterations: int, computed: bool, turns: int,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes only as a phase begins or ends: a busy machine may take a while between two looks at the clock."""
    now = 100.0

    def wait() -> None:
        nonlocal now
        now += 1e-3

    for module in (grpo, clocks):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(grpo, "PhaseClock", lambda _, outside: PhaseClock(wait, outside))
    row = row_of(*arguments)
    assert len(row["times_s"]) == len(row["phases_s"]) == 3 and len(row["losses"]) == 3 * iterations + 3
    for seconds, phases in zip(row["times_s"], row["phases_s"], strict=True):
        assert seconds == pytest.approx(sum(phases.values()), abs=1e-9)
        assert phases.keys() == {*grpo.PHASES} - ({grpo.LOG_PROBABILITIES} if not computed else set())
        assert all(phases[name] > 0 for name in (grpo.GENERATION, grpo.SWITCHING, grpo.TRAINING))
    assert row["step_s"] == pytest.approx(sum(row[f"{name}_s"] for name in grpo.PHASES), abs=1e-9)
    assert row["tokens_per_step"] == iterations * TOKENS and row["turns"] == turns
    assert row["tokens_per_s"] == pytest.approx(row["tokens_per_step"] / row["step_s"], rel=0.01)
    assert row["generated_tokens_per_s"] == pytest.approx(3 * 4 * 6 / row["generation_s"], rel=0.01)
    assert row["training_tokens_per_s"] == pytest.approx(
        row["tokens_per_step"] / (row["training_s"] + row["update_s"]), rel=0.01)
    assert row["full_rows_tokens_per_s"] == pytest.approx(2 * 1024 / row["full_rows_step_s"], rel=0.01)
    assert row["of_full_rows"] == pytest.approx(row["training_tokens_per_s"] / row["full_rows_tokens_per_s"], rel=0.01)
    assert all(0 < reward < 1 for reward in row["rewards"]) and len(set(row["rewards"])) > 1
    json.dumps(row)


@pytest.mark.nightly(held_by=(
    "tests/system/test_bench_grpo.py::test_a_phase_pauses_the_one_around_it_and_counts_the_work_that_it_issued",
    "tests/system/test_preference.py::test_online_trainers_sample_and_train_as_they_do_unstreamed"))
def test_one_more_step_is_recorded_by_op() -> None:
    row = row_of("--recorded")
    assert len(row["times_s"]) == 3, "the recorded step is not timed"
    recorded = row["recorded_s"]
    assert recorded["outputs token_fields"] > 0 and recorded["recompute_backward token_fields"] > 0
    assert {"forward decoder", "forward_saving decoder"} & recorded.keys() and "update" in " ".join(recorded)


def test_batches_of_one_step_have_one_size() -> None:
    with pytest.raises(MegacompileError, match="12 completions cannot be divided into 5 batches of one size"):
        row_of("--accumulation", "5")
    with pytest.raises(MegacompileError, match="--overlap updates in each backward"):
        row_of("--accumulation", "2", "--overlap")


def test_switches_are_timed_only_while_they_are_measured(model: Any) -> None:
    """Full rows are measured after it: a wait in each step would keep them from running beside updates."""
    streamed, device_copy = engine.of(model), model.megacompile.device_copy
    before = dict(vars(streamed)), dict(vars(device_copy))
    with grpo.switching_timed(model.megacompile, PhaseClock(lambda: None, grpo.REST), "megacompile"):
        assert {"use", "release"} <= vars(device_copy).keys() and "_enter" in vars(streamed)
    assert before == (dict(vars(streamed)), dict(vars(device_copy)))


def test_a_phase_pauses_the_one_around_it_and_counts_the_work_that_it_issued(monkeypatch: pytest.MonkeyPatch) -> None:
    now = issued = 0.0

    def wait() -> None:
        nonlocal now, issued
        now, issued = now + issued, 0.0

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = PhaseClock(wait, outside="rest")
    now += 1
    with clock.of("training"):
        issued += 2
        with clock.of("switching"):
            now += 4
        now += 8
        with contextlib.suppress(KeyError), clock.of("switching"):
            issued += 16
            raise KeyError
    issued += 32
    assert clock.taken() == {"rest": 33, "training": 10, "switching": 20}
    assert clock.taken() == {"rest": 0}
