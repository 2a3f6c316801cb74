"""`schedule(model, batch=, length=)`: what `stream` would run, without weights, memory or a device."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.api import analyse
from megacompile.config import StreamConfig, parse_bytes
from megacompile.errors import MegacompileError
from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.template import Template
from megacompile.lowering import model_program
from megacompile.passes import PIPELINE
from megacompile.passes.manager import compile_program
from megacompile.plan import Plan
from megacompile.planner import Planner, margins
from megacompile.program import Program
from megacompile.runtime.store import available_host_bytes
from megacompile.tiling import Tiling


@dataclass(frozen=True)
class Schedule:
    """A model's schedule for one batch shape. `stages`: the program after each pass; `log`: what each pass did."""

    captured: CapturedModel
    tiling: Tiling
    plan: Plan
    stages: Mapping[str, Program]
    log: list[str]

    def program(self, stage: str = "synchronize") -> Program:
        return self.stages[stage]

    @property
    def templates(self) -> Mapping[str, Template]:
        return self.captured.templates


def schedule(model: nn.Module, *, batch: int, length: int, layers: str | None = None,
             example: Mapping[str, Tensor] | None = None, **options: Any) -> Schedule:
    """The schedule of a training step of `batch` sequences of `length` tokens. `model` may be on the meta device; nothing of
    it is changed. Options as for `stream`; a schedule for device="cuda" needs no CUDA. Raises what `stream` raises."""
    for name, size in (("batch", batch), ("length", length)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise MegacompileError(f"{name} must be a whole number of at least 1, not {size!r}")
    config = StreamConfig.of(**options)
    device_type = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu")).type
    captured, tiling = analyse(model, config, device_type, layers, example)
    budget = parse_bytes(config.device_memory) or _default_budget(device_type)
    planner = Planner(captured, tiling, config, budget, parse_bytes(config.locked_memory), *margins(device_type))
    plan = planner.plan(batch, length)
    program = model_program(tiling.call_specs(captured.calls, captured.templates), tiling.tiles(), batch, labels=True)
    compiled = compile_program(program, plan, PIPELINE)
    return Schedule(captured, tiling, plan, compiled.stages, compiled.log)


def _default_budget(device_type: str) -> int:
    if device_type == "cuda" and torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    return available_host_bytes()
