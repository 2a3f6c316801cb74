"""An option of `stream` is one row of a table: whatever needs options finds a new row there."""
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

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
    "megacompile/ir/plan.py": ("    lengths: tuple[int, ...] = ()\n\n    @property", "    fancy_slots: int = 2\n")}
SCRIPT = """
import json, torch
from transformers import AutoModelForCausalLM, Qwen2Config
import megacompile
from megacompile.errors import MegacompileError
from megacompile.ir.text import parse_with_plan
from megacompile.planning.config import StreamConfig
from megacompile.planning.plan_cache import FIELDS
from megacompile.planning.plan_cache import question
from megacompile.tools.options import Knobs

def said(act):
    try:
        return repr(act())
    except MegacompileError as error:
        return str(error)

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
    "config": StreamConfig.of(fancy_slots=3).fancy_slots, "refused": said(lambda: StreamConfig.of(fancy_slots=1)),
    "attributes": StreamConfig.__doc__, "knobs": Knobs(fancy_slots=5).given(), "kept": "fancy_slots" in FIELDS,
    "question": question(schedule.planner, 2, 8, "step", False)["options"]["fancy_slots"], "plan": schedule.plan.fancy_slots,
    "text": text, "read back": parse_with_plan(text)[2].fancy_slots, "replanned": streamed.megacompile.plan.fancy_slots}))
"""


def test_a_new_option_is_a_row_and_is_found_wherever_options_are_used(tmp_path: Path) -> None:
    for name in ("megacompile", "passes", "runtime", "pyproject.toml"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    for name, (before, row) in ADDED.items():
        source = (tmp_path / name).read_text()
        assert source.count(before) == 1
        (tmp_path / name).write_text(source.replace(before, row + before))

    def run(*command: str) -> str:
        return subprocess.run([sys.executable, *command], check=True, stdout=subprocess.PIPE, text=True,
                              env={**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"}, cwd=tmp_path).stdout

    found = json.loads(run("-c", SCRIPT).splitlines()[-1])
    assert (found["config"], found["plan"], found["question"], found["read back"], found["replanned"]) == (3, 5, 5, 5, 4)
    assert found["refused"] == "fancy_slots must be a whole number of at least 2, not 1"
    assert "fancy_slots: Number of fancy slots, beside `weight_slots`. None: none." in found["attributes"]
    assert found["knobs"] == {"fancy_slots": 5} and found["kept"] and "fancy_slots=5" in found["text"]
    for command in ("plan", "train"):
        assert "--fancy-slots" in run("-m", "megacompile", command, "--help")


def test_every_row_says_what_the_option_does_and_what_leaving_it_out_means() -> None:
    for name, default, row in rows():
        assert row.help.endswith("."), name
        assert row.unset or default is not None, name
