"""A factory of small schedules, made by the real pipeline, for tests of anything that reads programs."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from megacompile.lowering import model_program
from megacompile.passes import PIPELINE
from megacompile.passes.manager import Compiled, compile_program
from megacompile.plan import Plan
from megacompile.program import CallSpec, Tile

LAYER_BYTES, BORDER_BYTES, OUTPUT_BYTES = 2048, 8192, 512


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/*.txt; read the diff")
    parser.addoption("--all-families", action="store_true", help="judge every causal language model of transformers, not a few")
    parser.addoption("--sabotage-programs", type=int, default=40, help="how many random programs tests/sabotage breaks; "
                     "from 500 on it also breaks goldens in many more ways")


@functools.cache
def compiled_schedule(layers: int = 4, micro_batches: tuple[int, ...] = (1,), frozen: tuple[str, ...] = (),
                      tied: bool = False, whole_step: bool = False, **plan: Any) -> Compiled:
    """All stages of a model of one prologue, `layers` equal layers and one epilogue; `tied`: the epilogue reads the
    prologue's tile too. Cached: programs are immutable."""
    names = ["prologue", *(f"layers.{i}" for i in range(layers)), "epilogue"]
    tiles, calls = {}, []
    for name in names:
        size = LAYER_BYTES if "." in name else BORDER_BYTES
        tiles[name] = Tile(name, size // 2, size, size, name not in frozen, 5 * size)
        role = "layer" if "." in name else name
        read = ("prologue", "epilogue") if tied and name == "epilogue" else (name,)
        calls.append(CallSpec(name, role, "decoder" if role == "layer" else name, read,
                              ("recompute_backward",) if name == "prologue" else (),
                              OUTPUT_BYTES if role == "layer" and "host_checkpoints" in plan else 0))
    batch = sum(micro_batches)
    model = model_program(calls, tiles, batch, labels=True, whole_step=whole_step)
    return compile_program(model, Plan(batch, 8, micro_batches, **plan), PIPELINE)


@pytest.fixture(scope="session")
def make_schedule() -> Callable[..., Compiled]:
    return compiled_schedule
