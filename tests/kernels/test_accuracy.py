"""The word problems of benchmarks/accuracy.py: correct, split into disjoint sets, and judged exactly."""
from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megacompile
from megacompile.errors import ArgumentError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def accuracy() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "accuracy.py"))


def test_no_problem_is_both_learnt_and_asked_and_answers_are_right(accuracy: dict[str, Any]) -> None:
    learn, held_out = accuracy["split"](0)
    asked = {" ".join(question): answer for question, answer in held_out}
    assert len(learn) == round(0.7 * len(accuracy["problems"]()))
    assert not asked.keys() & {" ".join(question) for question, _ in learn}
    known = {" ".join(question): answer for question, answer in accuracy["problems"]()}
    assert known["Ada has 7 apples and gives 5 away . how many apples are left ?"] == "2"
    assert known["Tom buys 12 boxes of 11 pens . how many pens are there ?"] == "132"
    assert accuracy["split"](0)[1] == held_out != accuracy["split"](1)[1]


@pytest.mark.parametrize(("wrong", "expected"), [(0, 1.0), (3, 0.7)])
def test_an_answer_counts_only_if_it_is_the_whole_answer(accuracy: dict[str, Any], wrong: int, expected: float) -> None:
    held_out = accuracy["split"](0)[1][:10]
    answers = {tuple(each.tokens[:-2]): each.tokens[-2:] for each in map(accuracy["encode"], held_out)}
    for number, question in enumerate(list(answers)[:wrong]):
        right = answers[question][0]
        answers[question] = [right + 1, 0] if number else [right, right]  # another answer, or one that does not end

    def generate(input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.cat([input_ids, torch.tensor([answers[tuple(row)] for row in input_ids.tolist()])], dim=1)

    model = SimpleNamespace(generate=generate, eval=lambda: None, device="cpu")
    assert accuracy["exact_match"](model, held_out) == pytest.approx(expected)


@pytest.mark.parametrize(("streamed", "expected"), [
    ((0.8, 0.9, 1.0), True), ((0.79, 0.81, 0.95), True), ((0.7, 0.6, 0.8), False)])
def test_means_agree_within_the_spread_of_seeds(accuracy: dict[str, Any], streamed: tuple[float, ...], expected: bool) -> None:
    assert accuracy["agree"]((0.8, 0.9, 1.0), streamed) is expected


def test_the_streamed_optimizer_is_the_one_that_is_named(accuracy: dict[str, Any]) -> None:
    make, adamw = accuracy["chosen_optimizer"], accuracy["ADAMW"]
    assert make("adamw", None).func is megacompile.AdamW and make("adamw", None).keywords == {**adamw, "state_dtype": "float32"}
    assert make("adamw_8bit", "master=bfloat16").keywords == {**adamw, "state_dtype": "8bit", "master": "bfloat16"}
    assert make("muon", "lr=1e-3").func is megacompile.Muon and make("muon", "lr=1e-3").keywords["lr"] == 1e-3
    with pytest.raises(ArgumentError, match="'masters=bfloat16' is not an option of AdamW"):
        make("adamw", "masters=bfloat16")
