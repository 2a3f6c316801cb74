"""The shape of the project: which folder may import which, and what a file may be called."""
from __future__ import annotations

import ast
import itertools
import re
import runpy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = runpy.run_path(str(ROOT / "docs" / "make_packages.py"))
FILES: dict[str, Path] = PACKAGES["source_files"]()
imports: Callable[..., Iterator[str]] = PACKAGES["imports"]
rank: Callable[[str], int] = PACKAGES["rank"]
#: The most lines that each package may have ("" has the modules directly in `megacompile/`). Lower a number as code goes. A
#: feature that raises one says in its commit what the lines buy.
BUDGET = {
    "": 3997, "checkpoint": 1483, "codegen": 778, "compat": 797, "finetuning": 3196, "frontend": 10231, "inference": 579,
    "inputs": 2166, "ir": 3083, "passes": 2578, "planning": 2898, "predict": 1591, "runtime": 6860, "streaming": 7809,
    "system": 858, "tools": 1136, "trainers": 1283, "verify": 1669, "weights": 2463,
}
VAGUE_NAMES = {"common", "helper", "helpers", "misc", "util", "utils"}

#: The three parts of the compiler. Two of them meet only in modules that belong to none.
PARTS = ("frontend", "passes", "runtime")
#: The language that the parts share. It knows none of them.
VOCABULARY = ("errors", "ir.ops", "ir.plan", "ir.program", "ir.text", "verify.verifier")


def part_of(module: str) -> str | None:
    return next((part for part in PARTS if f"{module}.".startswith(f"megacompile.{part}.")), None)


TREES = {module: ast.parse(path.read_text()) for module, path in FILES.items()}
IMPORTS = {module: set(imports(module, tree, FILES)) for module, tree in TREES.items()}


def chains(graph: Mapping[str, set[str]], start: str) -> Iterator[list[str]]:
    """For each module that importing `start` makes Python import: how it gets there."""
    seen, queue = {start}, [[start]]
    while queue:
        chain = queue.pop(0)
        yield chain
        last = chain[-1] if chain[-1] in graph else f"{chain[-1]}.__init__"
        for imported in sorted(graph.get(last, set()) - seen):
            seen.add(imported)
            queue.append([*chain, imported])


def wrong_chain(graph: Mapping[str, set[str]], module: str, allowed: str | None) -> str | None:
    """How a module reaches a part other than the allowed one; None if it does not."""
    for chain in chains(graph, module):
        if part_of(chain[-1]) not in (None, allowed):
            return " -> ".join(chain)
    return None


def test_imports_lead_downwards() -> None:
    upwards = [f"{module} imports {name}" for module in FILES for name in IMPORTS[module] if rank(name) > rank(module)]
    assert not upwards, "what is imported stands above the file: move what they share, or the call"


def circles(graph: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """The sets of modules of which each reaches all others."""
    files = {module: {f"{name}.__init__" if f"{name}.__init__" in graph else name for name in names}
             for module, names in graph.items()}
    reached = {module: set(itertools.chain.from_iterable(chains(files, module))) for module in files}
    found = {frozenset(other for other in reached[module] & reached.keys() if module in reached[other]) for module in graph}
    return {each for each in found if len(each) > 1}


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside functions and for types count too. An import of a package counts as one of its `__init__`."""
    assert not circles(IMPORTS)
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == {frozenset("abc")}
    assert circles({"p.__init__": {"p.a"}, "p.a": {"p"}, "p.b": {"p.a"}}) == {frozenset({"p.__init__", "p.a"})}


def test_an_import_upwards_is_seen() -> None:
    assert rank("megacompile.streaming.programs.captures") > rank("megacompile.inputs.batch") > rank("megacompile.ir.ops")
    assert rank("megacompile") == rank("megacompile.__init__") > rank("megacompile.checkpoint.writer")


def test_a_part_reaches_no_other_part() -> None:
    for module in filter(part_of, FILES):
        assert (chain := wrong_chain(IMPORTS, module, part_of(module))) is None, chain


def test_the_vocabulary_reaches_no_part() -> None:
    for name in VOCABULARY:
        assert (chain := wrong_chain(IMPORTS, f"megacompile.{name}", None)) is None, chain


@pytest.mark.parametrize(("module", "statement"), [
    ("megacompile.passes.schedule.place", "from megacompile.runtime import store"),
    ("megacompile.passes.pipeline", "import megacompile.frontend.capture"),
    ("megacompile.passes.pipeline", "from ..runtime import store"),
    ("megacompile.runtime.executor", "from megacompile.passes.pipeline import compile_program"),
    ("megacompile.runtime.executor", "def late():\n    from megacompile import passes"),
    ("megacompile.runtime.executor", "from megacompile import between"),
    ("megacompile.frontend.capture", "from megacompile.runtime.optimizer.host_update import update"),
    ("megacompile.ir.program", "import megacompile.passes"),
])
def test_an_import_in_the_wrong_direction_is_seen(module: str, statement: str) -> None:
    found = set(imports(module, ast.parse(statement), {*FILES, "megacompile.between"}))
    graph = {module: found, "megacompile.between": {"megacompile.passes.pipeline"}}
    assert wrong_chain(graph, module, part_of(module))


def test_folders_are_imported_by_their_installed_name() -> None:
    for module, node in ((module, node) for module, tree in TREES.items() for node in ast.walk(tree)):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            assert (node.module or "").split(".")[0] not in ("passes", "runtime"), f"{module}:{node.lineno}"
        if isinstance(node, ast.Import):
            assert all(alias.name.split(".")[0] not in ("passes", "runtime") for alias in node.names), module


def test_passes_take_their_settings_from_the_plan_alone() -> None:
    passes = {module: tree for module, tree in TREES.items() if part_of(module) == "passes"}
    for module, node in ((module, node) for module, tree in passes.items() for node in ast.walk(tree)):
        assert not isinstance(node, ast.Global), f"{module}:{node.lineno}: state outside the program"
        reads_environment = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
        assert not reads_environment, f"{module} reads an environment variable"


def test_a_file_name_is_used_at_most_twice() -> None:
    """Files of one name are hard to tell apart in an editor and in a traceback. Shims of public names do not count."""
    names = Counter(path.name for module, path in FILES.items() if path.name != "__init__.py" and module.count(".") > 1)
    assert not {name: count for name, count in names.items() if count > 2}


def test_no_package_is_larger_than_its_budget() -> None:
    lines: Counter[str] = Counter()
    for module, path in FILES.items():
        package = module.split(".")[1] if module.count(".") > 1 else ""
        lines[package] += path.read_text().count("\n")
    assert lines.keys() == BUDGET.keys()
    over = {package: f"{count} lines of {BUDGET[package]}" for package, count in lines.items() if count > BUDGET[package]}
    assert not over, "delete as much as you add, or raise the budget and say why"


def test_tests_name_the_parts_of_the_engine_in_one_module() -> None:
    """A change of the engine's insides changes `tests/support/engine.py`, not a hundred tests."""
    named = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("*.py"))
             if path.name != "engine.py" and re.search(r"\b(megacompile|handle)\.streamed\b", path.read_text())]
    assert not named, "use a public call, or a function of tests/support/engine.py"


def test_files_are_named_after_a_concept() -> None:
    assert not [module for module in FILES if VAGUE_NAMES & set(module.split("."))]
