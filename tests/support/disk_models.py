"""Tiny models with moments on disk, and how they are trained."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine
import tiny_models
from tiny_models import batch, state_of
from torch import Tensor

import megacompile
from megacompile.ir.program import argument, find

ROWS = 6
TILES = ("prologue", "model.layers.0", "model.layers.1", "model.layers.2", "epilogue")
#: Two of three layers on disk, between tiles in memory.
SOME = ("model.layers.0", "model.layers.2")


def streamed(bf16: bool, folder: Path, **options: Any) -> tiny_models.Shared:
    return tiny_models.Shared(bf16=bf16, micro_batch_size=2, disk=folder, **{"disk_state": "all", **options})


def step(model: Any, optimizer: Any, seed: int, whole: bool) -> None:
    if whole:
        model.megacompile.train_step(batch(seed, rows=ROWS), optimizer)
        return
    model(**batch(seed, rows=ROWS)).loss.backward()
    if seed == 2 and not optimizer.on_arrival:
        model(**batch(seed + 100, rows=ROWS)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def adamw(model: Any, **options: Any) -> Any:
    return megacompile.AdamW(model.parameters(), **{"lr": 1e-2, "eps": 1e-4, "max_grad_norm": 1.0, **options})


def trained(shared: tiny_models.Shared, whole: bool, make: Callable[..., Any] = adamw, steps: int = 10,
            **options: Any) -> dict[str, Tensor]:
    """Weights and optimizer state after some steps."""
    model = shared.fresh()
    optimizer = make(model, **options)
    for seed in range(steps):
        step(model, optimizer, seed, whole)
    return state_of(model, optimizer)


def update_of(model: Any) -> dict[str, set[str]]:
    """The tiles of each op of an update."""
    program = engine.trained(model).program
    graph = program.section("update" if "update" in program.sections else "train_step")
    return {op: {argument(node, "tile") for node in find(graph, op)}
            for op in ("read_state", "write_state", "update", "update_weights", "update_moments")}
