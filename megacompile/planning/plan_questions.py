"""What a search for a plan depends on, as data: two planners with the same question find the same plan.

A question contains templates as digests of their joint graphs, with all shapes in B and T; variants, costs and residuals follow
from these. Memory that was found free, not given by the user, is kept apart from the question.
"""
from __future__ import annotations

import dataclasses
from typing import Any

import torch

from megacompile.compat.inductor import config as inductor_config
from megacompile.ir.options import Scope, named
from megacompile.passes import PIPELINE, TEMPLATE_PIPELINE
from megacompile.planning.search_space import SearchSpace


def question(space: SearchSpace, batch: int, length: int, update: str, whole_step: bool) -> dict[str, Any] | None:
    """What the search for the plan of a training step depends on, as JSON values. None where plans are not kept: if there is no
    search, if compiled code is not kept (TORCHINDUCTOR_FORCE_DISABLE_CACHES), or with the user's own passes, which may read
    anything."""
    captured, tiling, config, simulator = space.captured, space.tiling, space.config, space.simulator
    if (simulator is None or not space.keep_residuals or inductor_config.force_disable_caches
            or config.passes != PIPELINE or config.template_passes != TEMPLATE_PIPELINE):
        return None
    calls = captured.calls_for(space.output)
    templates = {call.template: captured.templates[call.template] for call in (*captured.calls, *calls)}
    return {
        "torch": torch.__version__, "batch": batch, "length": length, "update": update, "whole_step": whole_step,
        "output": space.output, "stateful": space.stateful,
        "hardware": dataclasses.asdict(simulator.durations.hardware), "caution": simulator.caution,
        "device_bytes": None if config.device_memory is None else space.device_bytes,
        "host_bytes_left": None if config.host_memory is None else space.host_bytes_left,
        "pinned_bytes": space.pinned_bytes, "margin_bytes": space.margin_bytes, "fused": space.fused,
        "options": {name: getattr(config, name) for name in named(lambda row: row.scope is Scope.PLAN)},
        "model": {name: bool(getattr(captured, name)) for name in (
            "has_loss_denominator", "is_averaged", "across_rows", "fused_attention")},
        "pair_bytes": captured.pair_bytes, "patches": [(x.encoder.elements, str(x.dtype)) for x in captured.patches],
        "calls": [repr(call) for call in (*captured.calls, *calls)],
        "tiles": [repr(layout) for layout in tiling.layouts.values()], "tiles_of": dict(tiling.tiles_of),
        "hosts": tiling.hosts, "on_disk": tiling.on_disk,
        "templates": {name: template.digest for name, template in templates.items()},
    }


def free_memory(space: SearchSpace) -> dict[str, int]:
    """Bytes that plans may take where no budget was given, of "device" and "host" memory."""
    config = space.config
    there = {} if config.device_memory is not None else {"device": space.device_bytes}
    return there if config.host_memory is not None else there | {"host": space.host_bytes_left}
