"""The tutorials: every page runs and prints what it shows, and each notebook has the cells of its page."""
from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
MAKER = runpy.run_path(str(ROOT / "docs" / "make_notebooks.py"))
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in MAKER["pages"]()}


def pinned_torch() -> bool:
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    return pinned is not None and torch.__version__.split("+")[0] == pinned[1]


@pytest.mark.parametrize("name", PAGES)
def test_a_tutorial_prints_what_it_shows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To fix: `python docs/make_notebooks.py --execute`, and read the diff."""
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in MAKER["cells"](PAGES[name]) if cell.kind != "markdown"]
    assert len(cells) >= 4
    with MAKER["namespace"]() as names:
        for cell in cells:
            printed = MAKER["run"](cell, names)
            if pinned_torch():  # others trace other graphs
                assert MAKER["same"](cell.output, printed), f"{cell.source}\n\nprinted:\n{printed}\n\nshown:\n{cell.output}"


@pytest.mark.parametrize("name", PAGES)
def test_a_notebook_has_the_cells_of_its_page(name: str) -> None:
    """To fix: `python docs/make_notebooks.py`."""
    text = (ROOT / "docs" / "tutorials" / f"{name}.ipynb").read_text(encoding="utf-8")
    assert text == MAKER["notebook"](PAGES[name])
    cells = json.loads(text)["cells"]
    code = [cell for cell in MAKER["cells"](PAGES[name]) if cell.kind != "markdown"]
    assert sum(cell["cell_type"] == "code" for cell in cells) == len(code)
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert "".join(cell.text() for cell in MAKER["cells"](PAGES[name])) == PAGES[name]


def test_shown_output_may_round_differently_and_be_abbreviated_and_nothing_else() -> None:
    same = MAKER["same"]
    assert same("loss 2.30 in 3 steps", "loss 2.31 in 3 steps")
    assert not same("loss 2.30 in 3 steps", "loss 2.40 in 3 steps")
    assert not same("loss 2.30 in 3 steps", "loss 2.30 in 4 steps")
    assert same("a\n...\nlast 0.50", "a\nb 0.7\nc\nlast 0.50") and not same("a\n...", "b\nc")
