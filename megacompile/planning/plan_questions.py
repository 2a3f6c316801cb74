"""What a search for a plan depends on, as data: two planners with the same question find the same plan.

Templates are in it as their joint graphs, with the shapes of all values in B and T: variants, costs and residuals follow from
these. Memory that was not given by the user, but found free, is apart.
"""
from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor import config as inductor_config

from megacompile.passes import PIPELINE, TEMPLATE_PIPELINE
from megacompile.planning.config import StreamConfig

if TYPE_CHECKING:
    from megacompile.planning.planner import Planner

#: Options that change no plan, or whose results are in a question (graphs, budgets, passes).
ELSEWHERE = frozenset({"device", "device_memory", "pinned_memory", "host_memory", "dtype", "compile", "dynamic",
                       "expert_pieces", "passes", "template_passes", "loss", "stall_timeout", "repack", "reference"})


def question(planner: Planner, batch: int, length: int, update: str, whole_step: bool) -> dict[str, Any] | None:
    """What the search for the plan of a training step depends on, as JSON values. None where plans are not kept: if nothing is
    searched, if compiled code is not kept (TORCHINDUCTOR_FORCE_DISABLE_CACHES), or with the user's own passes, which may read
    anything."""
    captured, tiling, config, pace = planner.captured, planner.tiling, planner.config, planner.pace
    if (pace is None or not planner.keep_residuals or inductor_config.force_disable_caches
            or config.passes != PIPELINE or config.template_passes != TEMPLATE_PIPELINE):
        return None
    calls = captured.calls_for(planner.output)
    templates = {call.template: captured.templates[call.template] for call in (*captured.calls, *calls)}
    return {
        "torch": torch.__version__, "batch": batch, "length": length, "update": update, "whole_step": whole_step,
        "output": planner.output, "stateful": planner.stateful,
        "hardware": dataclasses.asdict(pace.durations.hardware),
        "device_bytes": None if config.device_memory is None else planner.device_bytes,
        "host_room": None if config.host_memory is None else planner.host_room,
        "pinned_bytes": planner.pinned_bytes, "margin_bytes": planner.margin_bytes, "fused": planner.fused,
        "knobs": {field.name: getattr(config, field.name) for field in dataclasses.fields(StreamConfig)
                  if field.name not in ELSEWHERE},
        "model": {name: bool(getattr(captured, name)) for name in (
            "has_loss_denominator", "is_averaged", "across_rows", "fused_attention")},
        "pair_bytes": captured.pair_bytes, "patches": [(x.encoder.elements, str(x.dtype)) for x in captured.patches],
        "calls": [repr(call) for call in (*captured.calls, *calls)],
        "tiles": [repr(layout) for layout in tiling.layouts.values()], "tiles_of": dict(tiling.tiles_of),
        "templates": {name: template.digest for name, template in templates.items()},
    }


def free_memory(planner: Planner) -> dict[str, int]:
    """Bytes that plans may take where no budget was given, by where they are."""
    config = planner.config
    there = {} if config.device_memory is not None else {"device": planner.device_bytes}
    return there if config.host_memory is not None else there | {"host": planner.host_room}
