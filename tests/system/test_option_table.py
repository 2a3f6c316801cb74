"""An option of `stream` is one row of a table: whatever needs options finds a new row there."""
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megacompile.ir.options import rows

ROOT = Path(__file__).resolve().parents[2]
#: What a person adds for a new option: its row, and the field of plans that a pass would read.
ADDED = {
    "megacompile/ir/options.py": (
        "    weight_slots: int | None = option(",
        """    fancy_slots: int | None = option(
        None, Takes.COUNT, Scope.PLAN, "Number of fancy slots, beside `weight_slots`.", unset="none", least=2, replan=True,
        flag=True, planned=True)
"""),
    "megacompile/ir/plan.py": ("    spread: int = 1\n\n    @functools.cached_property",
                               "    fancy_slots: int = 2\n")}
#: What needs no model, which would be captured for many seconds.
LIGHT = """
import json
from megacompile.errors import MegacompileError
from megacompile.planning.config import StreamConfig
from megacompile.planning.plan_cache import FIELDS
from megacompile.tools.options import Knobs

try:
    refused = StreamConfig.of(fancy_slots=1)
except MegacompileError as error:
    refused = str(error)
print(json.dumps({"config": StreamConfig.of(fancy_slots=3).fancy_slots, "refused": refused, "kept": "fancy_slots" in FIELDS,
                  "attributes": StreamConfig.__doc__, "knobs": Knobs(fancy_slots=5).given()}))
"""
SCRIPT = """
import json, torch
from transformers import AutoModelForCausalLM, Qwen2Config
import megacompile
from megacompile.ir.text import parse_with_plan
from megacompile.planning.plan_cache import question

model = AutoModelForCausalLM.from_config(Qwen2Config(
    vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1))
schedule = megacompile.schedule(model, batch=2, length=8, hardware="h200", fancy_slots=5)
streamed = megacompile.stream(model, device="cpu", fancy_slots=5)
batch = {name: torch.ones(2, 8, dtype=torch.long) for name in ("input_ids", "labels")}
streamed(**batch).loss.backward()
streamed.zero_grad()
text = streamed.megacompile.text(batch)
streamed.megacompile.replan(fancy_slots=4)
streamed(**batch).loss.backward()
print(json.dumps({
    "question": question(schedule.planner, 2, 8, "step", False)["options"]["fancy_slots"], "plan": schedule.plan.fancy_slots,
    "text": text, "read back": parse_with_plan(text)[2].fancy_slots, "replanned": streamed.megacompile.plan.fancy_slots}))
"""


Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs Python in a copy of the project that has the option."""
    for name in ("megacompile", "passes", "runtime", "pyproject.toml"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    for name, (before, row) in ADDED.items():
        source = (tmp_path / name).read_text()
        assert source.count(before) == 1
        (tmp_path / name).write_text(source.replace(before, row + before))

    def in_copy(*command: str) -> str:
        return subprocess.run([sys.executable, *command], check=True, stdout=subprocess.PIPE, text=True,
                              env={**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"}, cwd=tmp_path).stdout

    return in_copy


def test_a_new_option_is_a_row_and_is_found_wherever_options_are_used(run: Run) -> None:
    found = json.loads(run("-c", LIGHT))
    assert found["config"] == 3 and found["refused"] == "fancy_slots must be a whole number of at least 2, not 1"
    assert "fancy_slots: Number of fancy slots, beside `weight_slots`. None: none." in found["attributes"]
    assert found["knobs"] == {"fancy_slots": 5} and found["kept"]
    for command in ("plan", "train"):
        assert "--fancy-slots" in run("-m", "megacompile", command, "--help")


@pytest.mark.nightly(held_by=(
    "tests/system/test_option_table.py::test_a_new_option_is_a_row_and_is_found_wherever_options_are_used"))
def test_a_new_option_reaches_plans_questions_and_texts_of_a_model(run: Run) -> None:
    found = json.loads(run("-c", SCRIPT).splitlines()[-1])
    assert (found["plan"], found["question"], found["read back"], found["replanned"]) == (5, 5, 5, 4)
    assert "fancy_slots=5" in found["text"]


def test_every_row_says_what_the_option_does_and_what_leaving_it_out_means() -> None:
    for name, default, row in rows():
        assert row.help.endswith("."), name
        assert row.unset or default is not None, name
