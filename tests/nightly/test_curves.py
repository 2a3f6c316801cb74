"""Losses of whole runs, beside native PyTorch's. Minutes each: opt in with `--curve-steps 200`."""
from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "curves.py"


@pytest.fixture(scope="module")
def script() -> Any:
    specification = importlib.util.spec_from_file_location("curves", SCRIPT)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("family", ["mixtral", "gemma3", "gpt-oss", "qwen3-next"])
def test_every_loss_of_a_run_is_native_pytorch_s(family: str, script: Any, request: pytest.FixtureRequest) -> None:
    steps: int = request.config.getoption("--curve-steps")
    if not steps:
        pytest.skip("minutes long: give --curve-steps 200")
    found = script.curves(family, steps, script.text(), learning_rate=3e-4)
    assert found["native"][-1] < found["native"][0] - 0.2, "nothing was learned that could differ"
    assert script.largest_difference(found["native"], found["streamed"]) <= 1e-4
