"""Plans from earlier searches, kept in the user's cache folder, so that a second start does not search again."""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from megacompile import schema
from megacompile.codegen import cache
from megacompile.codegen.cache import CacheError, cache_directory
from megacompile.compat.inductor import config as inductor_config
from megacompile.ir.options import Scope, named
from megacompile.ir.placement import LISTS
from megacompile.ir.plan import Plan
from megacompile.passes import PIPELINE, TEMPLATE_PIPELINE
from megacompile.planning.search_space import SearchSpace
from megacompile.sizes import LONGEST_NAME

# --------------------
# Plans from earlier searches, kept in the user's cache folder, so that a second start of the same model on the same machine
# does not search.
#
#     plans/KEY.json      {"plan": {...}, "free": {...}}, then the seal (`cache.py`) of what is before it
#
# KEY is a digest of the question that the search answers (`plan_cache.py`) and of our source code. A plan is a few kilobytes of
# choices; programs are made from it and verified as from a new plan. `free` is the memory that the search found free where the
# user gave no budget. That is never the same twice, so a plan is reused where about as much memory is free.
#: The largest number of stored plans. The least recently used ones are dropped.
MOST_PLANS = 256
#: By which share free memory may differ from that of the search. Host memory rarely decides.
ALIKE: Mapping[str, float] = {"device": 0.01, "host": 0.125}
#: The most bytes of a file. A longer one is not a plan.
_LONGEST = 1 << 22

_count = schema.whole(0, 2**31 - 1)
_name = schema.must(lambda value: type(value) is str and len(value) < LONGEST_NAME, "a name")
#: The rule for a field of `Plan` in a file, by its annotation; `Plan` itself checks values and combinations.
_RULES: Mapping[str, schema.Rule] = {
    "int": _count, "bool": schema.flag, "str": _name, "tuple[str, ...]": schema.sequence(_name),
    "tuple[int, ...]": schema.sequence(_count)}
#: The rule for each of `Plan.values`.
FIELDS: Mapping[str, schema.Rule] = {
    **{each.name: _RULES[str(each.type)] for each in fields(Plan) if each.name != "placements"},
    **dict.fromkeys(LISTS, _RULES["tuple[str, ...]"])}
_FILE = schema.record({"plan": schema.record(FIELDS),
                       "free": schema.record({}, optional=dict.fromkeys(ALIKE, schema.whole(0, 2**63 - 1)))})


def find(question: Mapping[str, Any], free: Mapping[str, int]) -> Plan | None:
    """The plan that was kept for a question (JSON values) while about as much memory was `free` (bytes by the names in
    `ALIKE`). None if the plan or the cache folder is missing. A damaged or changed file is ignored with a RuntimeWarning."""
    try:
        plan, then = _read(_folder() / _name_of(question))
        return plan if then.keys() == free.keys() and all(
            abs(free[name] - then[name]) <= ALIKE[name] * then[name] for name in free) else None
    except (CacheError, FileNotFoundError):
        return None
    except (OSError, RecursionError, ValueError) as error:
        warnings.warn(f"a plan in the cache is not used and is searched for again: {error}", RuntimeWarning, stacklevel=2)
        return None


def _read(path: Path) -> tuple[Plan, dict[str, int]]:
    """The plan, and the bytes that were free. Raises `OSError`, `RecursionError`, and `ValueError` for a file without a
    plan."""
    found = json.loads(cache.read_kept(path, _LONGEST))
    _FILE(found, "the file")
    choices: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value
                               for name, value in found["plan"].items()}
    return Plan.of(**choices), found["free"]


def keep(question: Mapping[str, Any], free: Mapping[str, int], plan: Plan) -> None:
    """Writes the plan for a question. Does nothing if the file cannot be written."""
    contents = json.dumps({"plan": plan.values(), "free": dict(free)}, indent=0).encode()
    with contextlib.suppress(CacheError, OSError):
        cache.keep(_folder() / _name_of(question), contents, MOST_PLANS)


def _folder() -> Path:
    """Raises `CacheError`."""
    return cache_directory() / "plans"


def _name_of(question: Mapping[str, Any]) -> str:
    asked = json.dumps({**question, "source": source_digest()}, sort_keys=True, default=repr)
    return hashlib.sha256(asked.encode()).hexdigest()[:32] + ".json"


@functools.cache
def source_digest() -> str:
    """A digest of all our Python files, any of which may affect which plan is best."""
    import megacompile.passes
    import megacompile.runtime

    digest = hashlib.sha256()
    for package in (megacompile, megacompile.passes, megacompile.runtime):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


# -------------------- What a search for a plan depends on, as data: two planners with the same question find the same plan
#
# A question contains templates as digests of their joint graphs, with all shapes in B and T; variants, costs and residuals
# follow from these. Memory that was found free, not given by the user, is kept apart from the question.
def question(space: SearchSpace, batch: int, length: int, update: str, whole_step: bool) -> dict[str, Any] | None:
    """Everything that the search for the plan of a training step depends on, as JSON values. None if plans are not kept:
    without a search, if compiled code is not kept (TORCHINDUCTOR_FORCE_DISABLE_CACHES), or with the user's own passes, which
    may read anything."""
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
        "hosts": tiling.hosts, "spread": tiling.spread, "on_disk": tiling.on_disk,
        "templates": {name: template.digest for name, template in templates.items()},
    }


def free_memory(space: SearchSpace) -> dict[str, int]:
    """Bytes that plans may take if no budget was given, of "device" and "host" memory."""
    config = space.config
    there = {} if config.device_memory is not None else {"device": space.device_bytes}
    return there if config.host_memory is not None else there | {"host": space.host_bytes_left}
