"""The documentation's site: every page is reachable, every public name has an entry, and docstrings become markup."""
from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import megacompile
from megacompile.streaming.handle import Handle

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).with_suffix("").as_posix(): path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md")}
API = "".join(text for name, text in PAGES.items() if name.startswith("api/"))


def reached(page: str = "index") -> Iterator[str]:
    yield page
    folder = page.rpartition("/")[0]
    for tree in re.findall(r"```\{toctree\}\n(.*?)```", PAGES[page], re.DOTALL):
        for line in tree.splitlines():
            if line and not line.startswith(":"):
                yield from reached(f"{folder}/{line}".lstrip("/"))


def test_every_page_is_reachable_from_the_index() -> None:
    pages = list(reached())
    assert sorted(pages) == sorted(PAGES), "add the page to a toctree: docs/index.md, or the index of its folder"


def test_every_public_name_has_an_entry() -> None:
    directives = set(re.findall(r"^\.\. (?:auto\w+|py:data):: (?:megacompile\.)?(?:\w+\.)*(\w+)", API, re.MULTILINE))
    assert set(megacompile.__all__) - {"MegacompileError"} <= directives
    told = "".join(text for name, text in PAGES.items() if not name.startswith(("api/", "packages", "design", "decisions/")))
    told += (ROOT / "README.md").read_text(encoding="utf-8")
    methods = set(re.findall(r"model\.megacompile\.(\w+)", told))
    entry = re.search(r"handle\.Handle\n   :members: (.*?)\n\n", API, re.DOTALL)
    assert entry is not None and methods <= set(re.findall(r"\w+", entry[1])), "name it in docs/api/streaming.md"
    assert all(hasattr(Handle, name) for name in re.findall(r"\w+", entry[1]))
    imported = re.findall(r"from megacompile\.(trainer|sft|dpo|grpo|rloo|passes) import ([\w, ]+)", told)
    assert {name for _, names in imported for name in re.findall(r"\w+", names)} <= directives


def test_docstrings_become_markup() -> None:
    pytest.importorskip("sphinx")
    import runpy

    convert = runpy.run_path(str(DOCS / "conf.py"))["plain_to_rst"]
    assert convert(["A `x`s, *args, foo_ and ``z``."]) == [r"A ``x``\ s, \*args, foo\_ and ``z``."]
    assert convert(["Like so:", "", "    a * `b`", "", "Args:", "    c: of d"]) == [
        "Like so:", "", "::", "", "    a * `b`", "", "Args:", "    c: of d"]
    assert convert(["Gives `f(a,", "b)` of a.", "", "one     the first", "        of all", "", "End."]) == [
        "Gives ``f(a, b)`` of a.", "", "::", "", "    one     the first", "            of all", "", "End."]
