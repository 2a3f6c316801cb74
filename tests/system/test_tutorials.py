"""The tutorials: every page runs and prints what it shows, and each notebook has the cells of its page."""
from __future__ import annotations

import json
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
MAKER = runpy.run_path(str(ROOT / "docs" / "make_notebooks.py"))
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in MAKER["pages"]()}


def pinned_torch() -> bool:
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    return pinned is not None and torch.__version__.split("+")[0] == pinned[1]


#: The page that runs with every commit; the others capture larger models, for half a minute.
SMALLEST = "own-architecture"


@pytest.mark.parametrize("name", [
    name if name == SMALLEST else pytest.param(name, marks=pytest.mark.nightly) for name in PAGES])
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


@pytest.mark.nightly(held_by="tests/system/test_tutorials.py::test_a_tutorial_prints_what_it_shows")
@pytest.mark.parametrize("name", PAGES)
def test_a_jupyter_kernel_runs_a_notebook(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs `pip install nbclient ipykernel`. Commands find `megacompile` beside this Python."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    book = nbformat.read(ROOT / "docs" / "tutorials" / f"{name}.ipynb", as_version=4)
    nbformat.validate(book)
    shown = [printed_by(cell) for cell in book.cells]
    here = dict(metadata=dict(path=str(tmp_path)))
    nbclient.NotebookClient(book, timeout=600, kernel_name="python3", resources=here).execute()
    assert sum(cell.get("execution_count") is not None for cell in book.cells) >= 4
    for cell, text in zip(book.cells, shown, strict=True):
        if pinned_torch() and cell.cell_type == "code" and not cell.source.startswith("!"):
            assert MAKER["same"](text, printed_by(cell)), f"{cell.source}\n\nprinted:\n{printed_by(cell)}\n\nshown:\n{text}"


def printed_by(cell: Any) -> str:
    """What a notebook's cell has written to stdout."""
    outputs = cell.get("outputs", [])
    return "".join(each.text for each in outputs if each.output_type == "stream" and each.name == "stdout").rstrip("\n")


def test_shown_output_may_round_differently_and_be_abbreviated_and_nothing_else() -> None:
    same = MAKER["same"]
    assert same("loss 2.30 in 3 steps", "loss 2.31 in 3 steps")
    assert not same("loss 2.30 in 3 steps", "loss 2.40 in 3 steps")
    assert not same("loss 2.30 in 3 steps", "loss 2.30 in 4 steps")
    assert same("a\n...\nlast 0.50", "a\nb 0.7\nc\nlast 0.50") and not same("a\n...", "b\nc")
