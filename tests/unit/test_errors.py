"""The exception classes: one base class catches all of them, and each keeps the built-in class that it had."""
from __future__ import annotations

import ast
import builtins
import inspect
from pathlib import Path

from megacompile import errors
from megacompile.errors import LaneError, MegacompileError

ROOT = Path(__file__).resolve().parents[2]
#: Exceptions that end inside the package: no caller meets one.
INTERNAL = {"AbortedError", "BuildError", "NotTokensError", "TouchedError", "_WholeError"}
CLASSES = [each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, BaseException)]


def test_megacompile_error_catches_every_exception_of_the_package() -> None:
    assert [each for each in CLASSES if not issubclass(each, MegacompileError)] == []


def test_every_exception_of_the_package_is_made_of_one_in_errors_py() -> None:
    """Or never leaves the package."""
    foreign = {name for name, value in vars(builtins).items() if inspect.isclass(value) and issubclass(value, BaseException)}
    found = {node.name for folder in ("megacompile", "passes", "runtime") for path in (ROOT / folder).rglob("*.py")
             if path.name != "errors.py" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
             for base in node.bases if isinstance(base, ast.Name) and base.id in foreign}
    assert found == INTERNAL


def test_errors_of_lanes_stay_runtime_errors() -> None:
    """A loop that was written for RuntimeError catches them as before."""
    of_lanes = [each for each in CLASSES if issubclass(each, LaneError)]
    assert len(of_lanes) >= 4 and all(issubclass(each, RuntimeError) for each in of_lanes)
