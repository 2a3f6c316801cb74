"""The page of a step: every bar is an instruction of the program, with its line, bytes, waits and times."""
from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tiny_models import build
from typer.testing import CliRunner

import megacompile
from megacompile import cli, step_page
from megacompile.errors import ArgumentError
from megacompile.scheduling import Schedule

BEGIN, END, WORDS, LINE, BYTES, WAITS, CRITICAL = 1, 2, 4, 5, 6, 7, 8


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return megacompile.schedule(build(), batch=4, length=32, hardware="h200", micro_batch_size=2, whole_step=True)


@pytest.fixture(scope="module")
def shown(schedule: Schedule) -> dict[str, Any]:
    return step_page.data({"simulated": schedule.simulate()}, schedule)


def test_each_bar_has_the_line_and_the_bytes_of_its_instruction(schedule: Schedule, shown: dict[str, Any]) -> None:
    bars, tiles = shown["steps"][0]["bars"], schedule.program().tiles
    assert len(bars) > 40
    for bar in bars:
        op, *words = bar[WORDS].split()
        line = shown["text"][bar[LINE]]
        assert f"p.{op}(" in line and all(f'"{word}"' in line for word in words if "." in word)
        if op == "prefetch":
            assert bar[BYTES] == tiles[words[0]].weight_bytes > 0
        if op.startswith("forward"):
            assert bar[BYTES] == 0
    assert len({bar[LINE] for bar in bars}) > len(bars) / 2


def test_a_bar_begins_after_what_it_waits_for_and_critical_ones_fill_the_step(shown: dict[str, Any]) -> None:
    step = shown["steps"][0]
    waits = [(step["bars"][source], bar) for bar in step["bars"] for source in bar[WAITS]]
    assert len(waits) > 10 and all(source[END] <= bar[BEGIN] + 1e-6 for source, bar in waits)
    critical = sum(bar[END] - bar[BEGIN] for bar in step["bars"] if bar[CRITICAL])
    assert critical == pytest.approx(step["seconds"], rel=0.05)


def test_memory_rises_with_the_forward_and_ends_where_it_began(schedule: Schedule, shown: dict[str, Any]) -> None:
    memory = shown["steps"][0]["memory"]
    assert memory[0][1] == memory[-1][1] == shown["base"]
    peak = max(held for _, held in memory)
    assert shown["base"] < peak <= schedule.planner.estimate(schedule.plan).total
    assert [when for when, _ in memory] == sorted(when for when, _ in memory)


def test_the_command_writes_a_page_that_loads_nothing(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path / "model")
    page = tmp_path / "new" / "step.html"
    words = ["inspect", tmp_path / "model", "--batch", 2, "--length", 16, "--hardware", "h200", "--html", page]
    run = CliRunner().invoke(cli.app, [str(word) for word in words])
    assert run.exit_code == 0 and not run.output, run.output
    text = page.read_text()
    assert not re.search(r"https?:|<link|src=|@import|(?<!pre)fetch\(", text) and "const data = DATA" not in text
    assert json.loads(re.search(r"const data = (.*);\n", text)[1])["steps"][0]["name"] == "simulated"  # type: ignore[index]


def test_a_page_that_cannot_be_written_is_refused(schedule: Schedule, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match=r"step\.html cannot be written .*: give another file"):
        step_page.save({"simulated": schedule.simulate()}, tmp_path / "file" / "step.html", schedule)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_a_browser_zooms_and_shows_the_line_of_a_bar_that_is_clicked(schedule: Schedule, tmp_path: Path) -> None:
    page = tmp_path / "step.html"
    simulated = schedule.simulate()
    step_page.save({"simulated": simulated, "measured": simulated}, page, schedule)
    page.write_text(page.read_text() + """<script>
const panel = panels[0], bar = panel.step.bars.findLast(each => each[WAITS].length && each[BYTES]);
const where = panel.canvas.getBoundingClientRect(), x = LEFT + (bar[BEGIN] + bar[END]) / 2 / longest * span(panel);
const place = { clientX: where.left + x, clientY: where.top + bar[LANE] * ROW + 9, bubbles: true };
panel.canvas.dispatchEvent(new PointerEvent("click", place));
const clicked = chosen;
panel.canvas.focus();
panel.canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "+" }));
document.body.dataset.result = JSON.stringify({ words: clicked && clicked[WORDS], line: lines[clicked[LINE]].textContent,
  marked: document.querySelectorAll("pre .chosen").length, about: byId("about").textContent, zoomed: (to - from) / longest });
</script>""")
    done = subprocess.run(["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,900", "--dump-dom",
                           page.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'data-result="([^"]*)"', done.stdout)
    assert found is not None, done.stdout[-2000:]
    result = json.loads(found[1].replace("&quot;", '"'))
    assert result["words"].split()[0] in result["line"] and result["marked"] == 1 and result["zoomed"] == pytest.approx(0.8)
    assert result["about"].startswith(result["words"]) and "waits for " in result["about"] and "GB/s" in result["about"]
    assert "measured" in done.stdout and "over measured: 1.000" in done.stdout
