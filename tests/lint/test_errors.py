"""The exception classes: one base class catches all of them, and each keeps the built-in class that it had."""
from __future__ import annotations

import ast
import builtins
import inspect
from pathlib import Path
from typing import Any

import pytest
import tiny_models

from megacompile import errors
from megacompile.errors import CaptureError, LaneError, MegacompileError
from megacompile.frontend.capture import capture
from megacompile.frontend.templates import build
from megacompile.frontend.tracing import model_graph

ROOT = Path(__file__).resolve().parents[2]
#: Exceptions that end inside the package: no caller meets one.
INTERNAL = {"AbortedError", "BuildError", "NotTokensError", "SchemaError", "TouchedError", "_OnRankError", "_WholeError"}
CLASSES = [each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, BaseException)]


def test_megacompile_error_catches_every_exception_of_the_package() -> None:
    assert [each for each in CLASSES if not issubclass(each, MegacompileError | Warning)] == []


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


class _UserError(Exception):
    pass


FOREIGN = [TimeoutError("the user's alarm"), MemoryError(), OSError("the disk"), _UserError("a signal handler's")]


def _capture_with(patch: pytest.MonkeyPatch, module: Any, function: str, error: Exception) -> None:
    """Captures a model, in which this function, one of tracing's, raises an error."""
    def failed(*_: Any, **__: Any) -> Any:
        raise error

    patch.setattr(module, function, failed)
    capture(tiny_models.build())


@pytest.mark.sample(3)
@pytest.mark.parametrize("error", FOREIGN, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(("module", "function"), [(build, "joint_graph"), (model_graph, "dynamo_graph_capture_for_export")])
def test_an_unrelated_exception_raised_during_tracing_reaches_the_caller_unchanged(
        monkeypatch: pytest.MonkeyPatch, module: Any, function: str, error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        _capture_with(monkeypatch, module, function, error)
    assert caught.value is error


def test_a_system_error_that_tracing_has_wrapped_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = RuntimeError("internal error of Dynamo")
    wrapped.__cause__ = TimeoutError("the user's alarm")
    with pytest.raises(TimeoutError, match="the user's alarm"):
        _capture_with(monkeypatch, build, "joint_graph", wrapped)


def test_what_tracing_raises_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CaptureError, match="cannot be differentiated as one graph: not differentiable; use"):
        _capture_with(monkeypatch, build, "joint_graph", NotImplementedError("not differentiable"))
