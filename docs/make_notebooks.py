"""Makes docs/tutorials/NAME.ipynb of each docs/tutorials/NAME.md: `python docs/make_notebooks.py`.

A tutorial is one Markdown page. Its ```python blocks run from top to bottom in one namespace, its ```shell blocks are commands
of `megacompile`, and a ```text block after one of these shows what it prints. `--execute` runs the pages first and puts their
output into them. tests/system/test_tutorials.py runs every page and compares.
"""
from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

TUTORIALS = Path(__file__).resolve().parent / "tutorials"
_BLOCK = re.compile(r"^```(?P<kind>python|shell)\n(?P<source>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?",
                    re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\s*\(\[This\s+page\s+as\s+a\s+notebook\]\([^)]*\)\.\)")
_FLOAT = re.compile(r"[-+]?\d+\.\d+(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Cell:
    """A part of a tutorial. `kind`: "markdown", "python" or "shell"; `output`: what it prints, without the last newline."""

    kind: str
    source: str
    output: str = ""

    def text(self) -> str:
        """As in the page."""
        if self.kind == "markdown":
            return self.source
        shown = f"\n```text\n{self.output}\n```\n" if self.output else ""
        return f"```{self.kind}\n{self.source}\n```\n{shown}"


def pages() -> list[Path]:
    return [path for path in sorted(TUTORIALS.glob("*.md")) if path.stem != "index"]


def cells(page: str) -> Iterator[Cell]:
    end = 0
    for block in _BLOCK.finditer(page):
        yield Cell("markdown", page[end:block.start()])
        yield Cell(block["kind"], block["source"].rstrip("\n"), (block["output"] or "").rstrip("\n"))
        end = block.end()
    yield Cell("markdown", page[end:])


@contextlib.contextmanager
def namespace() -> Iterator[dict[str, Any]]:
    """The names of one page: those of a module that can be imported, since Dynamo looks up a function's globals by its module's
    name."""
    module = ModuleType("tutorial")
    sys.modules[module.__name__] = module
    try:
        yield module.__dict__
    finally:
        del sys.modules[module.__name__]


def run(cell: Cell, names: dict[str, Any]) -> str:
    """What a cell prints. It runs in this process, in the current folder; a shell cell is a command of `megacompile`."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if cell.kind == "python":
            exec(compile(cell.source, "<tutorial>", "exec"), names)
        else:
            from megacompile.cli import app

            program, *arguments = shlex.split(cell.source.replace("\\\n", " "))
            assert program == "megacompile", cell.source
            app(arguments, standalone_mode=False)
    return "\n".join(line.rstrip() for line in printed.getvalue().rstrip("\n").splitlines())


def same(shown: str, printed: str, tolerance: float = 0.02) -> bool:
    """Whether a page shows what was printed: "..." stands for anything, and numbers with a point may differ by `tolerance` of
    themselves, since kernels round differently on other processors."""
    pattern = re.escape(shown).replace(re.escape("..."), ".*?")
    numbers = _FLOAT.findall(shown)
    for number in numbers:
        pattern = pattern.replace(re.escape(number), "\0", 1)
    match = re.fullmatch(pattern.replace("\0", f"({_FLOAT.pattern})"), printed, re.DOTALL)
    return match is not None and all(abs(float(a) - float(b)) <= tolerance * abs(float(a)) + 1e-3
                                     for a, b in zip(numbers, match.groups(), strict=True))


def notebook(page: str) -> str:
    """The page as a notebook, format 4.5. The same page gives the same text."""
    made = []
    for number, cell in enumerate(c for c in cells(page) if c.source.strip()):
        source = _LINK.sub("", cell.source).strip("\n")
        entry: dict[str, Any] = dict(id=f"cell-{number}", metadata={}, source=source.splitlines(keepends=True))
        if cell.kind == "markdown":
            made.append(dict(cell_type="markdown", **entry))
            continue
        if cell.kind == "shell":
            entry["source"] = f"!{source}".splitlines(keepends=True)
        printed = f"{cell.output}\n".splitlines(keepends=True)
        shown = dict(output_type="stream", name="stdout", text=printed)
        made.append(dict(cell_type="code", execution_count=None, outputs=[shown] if cell.output else [], **entry))
    kernel = dict(display_name="Python 3", language="python", name="python3")
    return json.dumps(dict(cells=made, metadata=dict(kernelspec=kernel, language_info=dict(name="python")), nbformat=4,
                           nbformat_minor=5), indent=1, ensure_ascii=False) + "\n"


def executed(page: str) -> str:
    """The page with what its cells print now. Output that the page abbreviates with "..." stays if it still fits."""
    made: list[str] = []
    with namespace() as names:
        for cell in cells(page):
            if cell.kind == "markdown":
                made.append(cell.text())
                continue
            printed = run(cell, names)
            made.append(Cell(cell.kind, cell.source, cell.output if same(cell.output, printed) else printed).text())
    return "".join(made)


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the notebooks of the tutorials.")
    parser.add_argument("--execute", action="store_true", help="run the pages first, and put what they print into them")
    parser.add_argument("names", nargs="*", help="of pages; default: all")
    arguments = parser.parse_args()
    for path in pages():
        if arguments.names and path.stem not in arguments.names:
            continue
        if arguments.execute:
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                made = executed(path.read_text(encoding="utf-8"))
            path.write_text(made, encoding="utf-8")
        path.with_suffix(".ipynb").write_text(notebook(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(os.path.relpath(path.with_suffix(".ipynb")))


if __name__ == "__main__":
    main()
