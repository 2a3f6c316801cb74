"""What would fit where no plan does: said with the refusal."""
from __future__ import annotations

from bisect import bisect_left
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from megacompile.errors import NoFittingPlanError
from megacompile.planning.config import StreamConfig
from megacompile.sizes import format_bytes

if TYPE_CHECKING:
    from megacompile.planning.planner import Planner

#: Options of `stream` that may be what stands in a plan's way.
OPTIONS = ("weight_slots", "gradient_slots", "micro_batch_size", "checkpoint_interval", "saved_layers", "token_chunk",
           "host_checkpoints", "resident", "resident_state")
#: No shorter sequences are of interest.
LEAST_LENGTH = 16


def explained(planner: Planner, batch: int, length: int, training: bool, refusal: NoFittingPlanError) -> NoFittingPlanError:
    """The refusal of the smallest plan of a training step, with batches and options that would fit the device."""
    if not training or refusal.need <= planner.device_bytes:
        return refusal
    more = f"a larger device_memory ({format_bytes(refusal.need)} for this smallest plan)"
    batches, options = _batches(planner, batch, length), _options(planner, batch, length)
    if batches:
        remedy = f"use fewer or shorter sequences ({' or '.join(batches)} would fit), or {more}"
    else:
        remedy = f"no shorter sequence and no smaller batch fits, use {more} or a smaller model"
    return NoFittingPlanError(refusal.cause, "; ".join([remedy, *options]) + planner.averaging(), refusal.need)


def _batches(planner: Planner, batch: int, length: int) -> list[str]:
    """The largest batch of this length, and the longest sequences of such a batch."""
    found = []
    fewer = bisect_left(range(1, batch), True, key=lambda count: not planner.holds(count, length))
    if fewer:
        found.append(f"{fewer} x {length}")
    shorter = (length >> halvings for halvings in range(1, length.bit_length()))
    fitting = next((each for each in shorter if each >= LEAST_LENGTH and planner.holds(batch, each)), None)
    if fitting is not None:
        found.append(f"{batch} x {fitting}")
    return found


def _options(planner: Planner, batch: int, length: int) -> list[str]:
    """Options that were given and without which this batch fits."""
    defaults: dict[str, Any] = {field.name: field.default for field in fields(StreamConfig)}
    given = {name: value for name in OPTIONS if (value := getattr(planner.config, name)) != defaults[name]}

    def hinders(name: str) -> bool:
        other: dict[str, Any] = {name: defaults[name]}
        return replace(planner, config=replace(planner.config, **other)).holds(batch, length)

    return [f"without {name}={value!r} it would fit" for name, value in given.items() if hinders(name)]
