"""Pages that are made match what they are made from, and every fault in docs/faults.md has its test."""
from __future__ import annotations

import re
import runpy
from pathlib import Path

import torch

from megacompile.passes import PIPELINE, TEMPLATE_PIPELINE

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_passes_is_current() -> None:
    """To fix: `python docs/make_passes.py`, and read the diff."""
    made, page = runpy.run_path(str(ROOT / "docs" / "make_passes.py"))["page"](), (ROOT / "docs" / "passes.md").read_text(
        encoding="utf-8")
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None, "constraints.txt pins torch"
    if torch.__version__.split("+")[0] != pinned[1]:  # another version traces other graphs
        made, page = (text[:text.index("## Template passes")] for text in (made, page))
    assert made == page


def test_the_page_and_the_picture_of_packages_are_current() -> None:
    """To fix: `python docs/make_packages.py`, and read the diff."""
    made = runpy.run_path(str(ROOT / "docs" / "make_packages.py"))
    assert made["page"]() == (ROOT / "docs" / "packages.md").read_text(encoding="utf-8")
    assert made["picture"]() == (ROOT / "docs" / "pictures" / "packages.svg").read_text(encoding="utf-8")


def test_the_page_shows_every_pass_before_and_after() -> None:
    page = (ROOT / "docs" / "passes.md").read_text(encoding="utf-8")
    sections = re.split(r"^### \d+\. ", page, flags=re.MULTILINE)[1:]
    assert len(sections) == len(PIPELINE) + len(TEMPLATE_PIPELINE)
    for section in sections:
        blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
        assert 1 <= len(blocks) <= 2 and all(3 <= len(block.splitlines()) <= 12 for block in blocks), section
        assert len(blocks) == 1 or blocks[0] != blocks[1]


def test_every_row_of_the_fault_table_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    tests = set(re.findall(r"^def (test_\w+)", "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")), re.MULTILINE))
    assert len(rows) > 20
    for row in rows:
        *_, last = row.strip("| ").split(" | ")
        named = re.findall(r"`(test_\w+)`", last)
        assert named and set(named) <= tests, row


def test_what_fits_is_made_from_its_plans() -> None:
    """To fix: `python docs/make_what_fits.py --page`."""
    made = runpy.run_path(str(ROOT / "docs" / "make_what_fits.py"))
    assert made["page"]() == made["PAGE"].read_text(encoding="utf-8")
    assert made["chooser"]() == made["CHOOSER"].read_text(encoding="utf-8")
    plans = made["known"]()
    assert len(made["complete"]()) >= 2 and all("tokens_per_s" in row or row["reason"] for row in plans.values())
    machines, models = {machine.name for machine in made["MACHINES"]}, made["MODELS"]
    assert all(model in models and machine in machines and method in made["METHODS"] for model, machine, method in plans)
    assert all(model in models and machine in machines for model, machine, _ in made["MEASURED"])
