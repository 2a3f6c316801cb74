"""Each test that runs nightly names a test of every commit that holds its property, and that test is there."""
from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "tests").glob("*/test_*.py"))
TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in FILES}


def _marks(function: ast.FunctionDef) -> Iterator[ast.expr]:
    """The decorators `pytest.mark.nightly` of a test, called or not."""
    for decorator in function.decorator_list:
        if ast.unparse(decorator).startswith("pytest.mark.nightly"):
            yield decorator


TESTS = {f"{name}::{function.name}": function for name, tree in TREES.items() for function in ast.walk(tree)
         if isinstance(function, ast.FunctionDef) and function.name.startswith("test_")}
NIGHTLY = {name for name, function in TESTS.items() if any(_marks(function)) or name.startswith("tests/nightly/")}


def test_a_nightly_test_names_one_of_every_commit() -> None:
    wrong = []
    for name, function in TESTS.items():
        for mark in _marks(function):
            words = {word.arg: word.value for word in mark.keywords} if isinstance(mark, ast.Call) else {}
            names = [text.value for text in ast.walk(words.get("held_by", ast.Tuple())) if isinstance(text, ast.Constant)]
            wrong += [f"{name}: {each} is nightly too" for each in names if each in NIGHTLY]
            wrong += [f"{name}: {each} does not exist" for each in names if each not in TESTS]
            if not names:
                wrong.append(f"{name}: say held_by=...")
    assert not wrong, "\n".join(wrong)


def test_most_tests_run_per_commit() -> None:
    assert len(NIGHTLY) < len(TESTS) / 5
