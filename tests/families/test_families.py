"""Every causal language model of transformers streams exactly or is refused with a reason, as docs/families.md says."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from make_families import PAGE, README, counts, page, read_rows
from tiny_configs import classes
from verdicts import Verdict, judge, judge_compiled, judge_each, predicted_step

#: Attention in chunks beside full attention, experts in every second layer; attention to chosen tokens.
FAST = ("llama4_text", "axk2")


def stated_outcome(model_type: str) -> str:
    """That of the page."""
    return {row.model_type: row for row in read_rows().values()}[model_type].outcome


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    everything = metafunc.config.getoption("--all-families")
    exact = [row.model_type for row in read_rows().values() if row.outcome == "exact"]  # those that stream
    of_all = {"model_type": (classes().values(), FAST), "compiled_type": (classes().values(), ()), "planned_type": (exact, ()),
              "keeping_type": (exact, FAST)}
    for name in of_all.keys() & set(metafunc.fixturenames):
        metafunc.parametrize(name, of_all[name][not everything])


@pytest.fixture
def judged(pytestconfig: pytest.Config) -> Callable[..., Verdict]:
    """`judge`; of many families, each in a process of its own, with a limit of time."""
    def alone(model_type: str, **options: Any) -> Verdict:
        (verdict,) = judge_each([model_type], start="spawn", **options)
        return verdict

    return alone if pytestconfig.getoption("--all-families") else lambda model_type, **options: judge(model_type, options)


def test_a_family_has_the_verdict_of_the_page(model_type: str, judged: Callable[..., Verdict]) -> None:
    verdict = judged(model_type)
    assert verdict.outcome == stated_outcome(model_type) != "wrong", verdict.reason


def test_a_family_that_keeps_attention_s_results_alone_is_exact(keeping_type: str, judged: Callable[..., Verdict]) -> None:
    """Layers of it that have no attention keep nothing then."""
    verdict = judged(keeping_type, saved_layers=1 << 10, residuals="attention")
    assert verdict.outcome == "exact", verdict.reason


def test_a_family_compiled_in_bf16_is_as_exact_as_native_bf16(compiled_type: str) -> None:
    """On the GPU where there is one (about a minute each, most of it inductor's); where it streams at all."""
    verdict = judge_compiled(compiled_type, "cuda" if torch.cuda.is_available() else "cpu")
    assert stated_outcome(compiled_type) != "exact" or verdict.outcome == "exact", verdict.reason


def test_a_family_that_streams_is_planned_by_the_rates_of_a_gpu(planned_type: str) -> None:
    """None of which is needed (10 to 90 seconds each). Its graphs are the GPU's, and all of its sizes need a time."""
    assert 0 < predicted_step(planned_type, "h200") < 1


def test_no_family_is_wrong_and_the_counts_are_those_of_the_table() -> None:
    rows = read_rows()
    assert rows.keys() == classes().keys(), "run docs/make_families.py"
    assert not [row.cls for row in rows.values() if row.outcome == "wrong"]
    assert all(row.reason for row in rows.values() if row.outcome in ("refused", "not built"))
    counted = page(list(rows.values())).split("\n**", 1)[1]
    assert PAGE.read_text().split("\n**", 1)[1] == counted
    assert f"{counts(list(rows.values()))} causal language models" in README.read_text()
