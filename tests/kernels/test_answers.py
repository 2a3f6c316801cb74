"""Rows with good and bad answers, in the layouts that people have."""
from __future__ import annotations

from typing import Any

import pytest

from megacompile.errors import MegacompileError
from megacompile.finetuning.answers import preference_of, verdict_of

ASKED = [{"role": "user", "content": "1 + 1"}]
GOOD, BAD = ([{"role": "assistant", "content": text}] for text in ("2", "3"))
SHAREGPT = [{"from": "human", "value": "1 + 1"}]


@pytest.mark.parametrize("row", [
    {"prompt": "1 + 1", "chosen": "2", "rejected": "3"},
    {"question": "1 + 1", "chosen": "2", "rejected": "3"},
    {"instruction": "1 + 1", "input": "", "chosen": "2", "rejected": "3"},
    {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
    {"prompt": "1 + 1", "chosen": [*ASKED, *GOOD], "rejected": [*ASKED, *BAD]},
    {"chosen": [*ASKED, *GOOD], "rejected": [*ASKED, *BAD]},
    {"conversations": SHAREGPT, "chosen": {"from": "gpt", "value": "2"}, "rejected": {"from": "gpt", "value": "3"}},
    {"messages": ASKED, "chosen": GOOD[0], "rejected": BAD[0]}], ids=lambda row: " ".join(row))
def test_a_pair_of_answers_is_read_from_each_layout(row: dict[str, Any]) -> None:
    assert preference_of(row) == {"prompt": ASKED, "chosen": GOOD, "rejected": BAD}


@pytest.mark.parametrize("row", [
    {"prompt": "1 + 1", "completion": "2"}, {"instruction": "1 + 1", "output": "2"}, {"messages": [*ASKED, *GOOD]},
    {"prompt": ASKED, "completion": GOOD},
    {"conversations": [*SHAREGPT, {"from": "gpt", "value": "2"}]}], ids=lambda row: " ".join(row))
@pytest.mark.parametrize("label", [True, False, 0, 1])
def test_a_verdict_is_read_from_each_layout(row: dict[str, Any], label: Any) -> None:
    assert verdict_of({**row, "label": label}) == {"prompt": ASKED, "completion": GOOD, "label": bool(label)}


def test_a_column_system_becomes_the_first_message() -> None:
    found = preference_of({"system": "Count.", "question": "1 + 1", "chosen": "2", "rejected": "3"})
    assert found["prompt"] == [{"role": "system", "content": "Count."}, *ASKED]


@pytest.mark.parametrize(("read", "row", "reason"), [
    (preference_of, {"prompt": "1 + 1", "chosen": "2"}, "rejected is missing"),
    (preference_of, {"prompt": "1 + 1", "chosen": "2", "rejected": "2"}, "chosen and rejected are equal"),
    (preference_of, {"prompt": "1 + 1", "chosen": ASKED, "rejected": "3"}, "chosen does not end with an answer"),
    (preference_of, {"chosen": "2", "rejected": "3"}, "the row has no prompt"),
    (verdict_of, {"prompt": "1 + 1", "completion": "2", "label": "good"}, "label is 'good', but must be true"),
    (verdict_of, {"prompt": "1 + 1", "label": True}, "the row has no answer: give it a column completion")])
def test_a_row_that_is_not_one_is_refused_with_the_reason(read: Any, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(MegacompileError, match=reason):
        read(row)
