"""The steps of a capture: each reads and makes what it says, and a person can watch them."""
from __future__ import annotations

import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from test_frozen import decoder
from torch import nn

import megacompile
from megacompile.errors import CaptureError, MegacompileError
from megacompile.frontend import capture
from megacompile.frontend.pipeline import CaptureState, Given, Step
from megacompile.frontend.steps import STEPS

HINTS = typing.get_type_hints(CaptureState)
BY_NAME = {step.name: step for step in STEPS}


def _plain(hint: Any) -> Any:
    """A type in which all sequences are alike, and all mappings."""
    origin, arguments = typing.get_origin(hint), tuple(map(_plain, typing.get_args(hint)))
    if origin is None:
        return hint
    kind = next((each for each in (Mapping, Sequence) if isinstance(origin, type) and issubclass(origin, each)), origin)
    return kind, arguments[:1] if kind is Sequence and arguments[1:] == (...,) else arguments


@pytest.mark.parametrize("step", STEPS, ids=list(BY_NAME))
def test_a_step_reads_what_was_given_or_made_before_it(step: Step) -> None:
    earlier = STEPS[:STEPS.index(step)]
    known = {*typing.get_type_hints(Given), "name", *(name for before in earlier for name in before.gives)}
    assert set(step.reads) <= known
    assert set(step.changes) <= set(step.reads)
    assert set(step.gives) <= HINTS.keys()


@pytest.mark.parametrize("step", STEPS, ids=list(BY_NAME))
def test_a_steps_types_are_those_of_the_state(step: Step) -> None:
    hints = typing.get_type_hints(step.run)
    returned = hints.pop("return")
    expected = {**HINTS, "name": str}
    assert {name: _plain(hint) for name, hint in hints.items()} == {name: _plain(expected[name]) for name in hints}
    made = typing.get_args(returned) if len(step.gives) > 1 else (returned,) if step.gives else ()
    assert returned is not type(None) or not step.gives
    assert [_plain(hint) for hint in made] == [_plain(HINTS[name]) for name in step.gives]


def _blocks(text: str) -> dict[str, str]:
    """By the first word of each unindented line: the line, and the indented lines after it."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if not line.startswith(" "):
            word = line.split(" = ")[0].split()[0].split(".")[0].rstrip(":")
            name = {"section": "sections", "template": "templates"}.get(word, word)
        found[name] = found.get(name, "") + line + "\n"
    return found


@pytest.mark.parametrize("make", [
    pytest.param(tiny_models.build, marks=pytest.mark.nightly), lambda: decoder("layers.1", "head")],
    ids=["transformers", "own"])
def test_a_step_changes_nothing_else_than_it_says(make: Any) -> None:
    seen: list[str] = []

    def watch(step: Step, before: str, after: str) -> None:
        was, now = _blocks(before), _blocks(after)
        different = {name for name in was.keys() | now.keys() if was.get(name) != now.get(name)}
        assert different <= {*step.gives, *step.changes}, step.name
        seen.append(step.name)

    model = make()
    watched, plain = capture(model, watch=watch), capture(model)
    assert seen == list(BY_NAME)
    assert [x.stages for x in watched.templates.values()] == [x.stages for x in plain.templates.values()]


@pytest.mark.nightly(held_by=(
    "tests/model/test_capture_steps.py::test_a_step_changes_nothing_else_than_it_says",
    "tests/model/test_capture_steps.py::test_the_last_step_shown_stands_before_the_one_that_refuses"))
def test_steps_are_shown_with_the_lines_that_they_change() -> None:
    shown: list[str] = []
    megacompile.explain_capture(tiny_models.build(), device="cpu", show_steps=shown.append)
    assert [text.partition(":")[0] for text in shown] == list(BY_NAME)
    normalized = shown[list(BY_NAME).index("normalize the loss")]
    assert "  +    input loss_denominator: float32 []" in normalized and "reduction = 'sum'" in normalized
    assert "-> nothing: a check" in shown[list(BY_NAME).index("check state")]


def test_the_last_step_shown_stands_before_the_one_that_refuses() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layers = nn.Embedding(9, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
            x = self.embedding(input_ids)
            for layer in self.layers:
                x = layer(x)
            return {"loss": x.float().mean(), "logits": x, "other": 1}

    shown: list[str] = []
    with pytest.raises(MegacompileError, match="other=int"):
        megacompile.explain_capture(Fixed(), device="cpu", show_steps=shown.append)
    assert shown[-1].startswith("adopt attention"), "the next one is 'find the output'"


def test_steps_of_a_streamed_model_are_not_there_to_be_shown(model: Any) -> None:
    with pytest.raises(MegacompileError, match="show_steps") as caught:
        megacompile.explain_capture(model, show_steps=print)
    assert not isinstance(caught.value, CaptureError) and "before stream" in str(caught.value)


def test_the_docs_list_all_steps_in_order() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "custom-architectures.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| [A-Z]", page.partition("## The steps of a capture")[2], re.MULTILINE)
    assert [name for row in rows for name in row.split(", ")] == list(BY_NAME)
