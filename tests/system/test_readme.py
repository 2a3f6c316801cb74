"""The README is true: its example runs, and its schedule is what the passes make. The tables of the results are the rows'."""
from __future__ import annotations

import datetime
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[0], "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "def forward(p):" in printed and "step 9: loss" in printed and printed.count("\n") < 120
    assert (tmp_path / "runs/readme/config.json").exists()


def test_the_schedule_is_what_the_passes_make(make_schedule: Callable[..., Any]) -> None:
    printed = make_schedule(layers=2, micro_batches=(1, 1)).program.text("forward")
    lines = [line for line in BLOCKS[1].splitlines() if line.strip() != "..."]
    assert "\n".join(line.split("  #")[0].rstrip() for line in lines) in "\n".join(
        line.split("  #")[0].rstrip() for line in printed.splitlines()
        if not re.search(r"p\.enter\(|p\.leave\(", line))


def test_the_data_of_the_readme_is_right() -> None:
    rows = [json.loads(line) for line in (ROOT / "examples/dates.jsonl").read_text().splitlines()]
    assert len(rows) == len({row["instruction"] for row in rows}) == 400
    for row in rows:
        date = datetime.date.fromisoformat(row["output"])
        assert {str(date.day), str(date.year)} <= set(re.findall(r"\d+", row["instruction"]))
        assert f"{date:%b}" in row["instruction"]


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 130


def test_the_table_of_predictions_is_the_results(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """To fix: put what `python benchmarks/predictions.py` prints into the page."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["benchmarks/predictions.py"])
    runpy.run_path("benchmarks/predictions.py", run_name="__main__")
    assert capsys.readouterr().out.strip() in (ROOT / "benchmarks/results/README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("page", "arguments"), [
    ("benchmarks/results/README.md", ()),
    *(("benchmarks/results/README.md", ("benchmarks/results/step.jsonl", table, "--brief"))
      for table in ("gates", "depth", "ablation", "width", "large", "whole", "batch", "budgets", "context", "kinds"))])
def test_the_figures_are_the_results(page: str, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    """To fix: put what `python benchmarks/table.py ARGUMENTS` prints into the page."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["benchmarks/table.py", *arguments])
    runpy.run_path("benchmarks/table.py", run_name="__main__")
    assert capsys.readouterr().out.strip() in (ROOT / page).read_text(encoding="utf-8")
