"""Remedies for a refusal: which batches and options would fit where no plan does."""
from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import Any

from megacompile.errors import NoFittingPlanError
from megacompile.ir.options import rows
from megacompile.planning.search_space import SearchSpace
from megacompile.sizes import format_bytes

#: The shortest sequences that a remedy names.
LEAST_LENGTH = 16


def explained(space: SearchSpace, batch: int, length: int, training: bool, refusal: NoFittingPlanError,
              update: str = "step") -> NoFittingPlanError:
    """The refusal with the batches and options that would fit the device, for a training step that does not."""
    if not training or refusal.need <= space.device_bytes:
        return refusal
    more = f"a larger device_memory ({format_bytes(refusal.need)} for this smallest plan)"
    batches, options = _batches(space, batch, length, update), _options(space, batch, length, update)
    if batches:
        remedy = f"use fewer or shorter sequences ({' or '.join(batches)} would fit), or {more}"
    else:
        remedy = f"use {more}, or a smaller model; no shorter sequence and no smaller batch fits"
    return NoFittingPlanError(refusal.cause, "\nor ".join([remedy, *options]) + space.averaging(), refusal.need)


def _batches(space: SearchSpace, batch: int, length: int, update: str) -> list[str]:
    """The largest batch of this length that fits, and the longest sequences with which this batch fits."""
    found = []
    fewer = bisect_left(range(1, batch), True, key=lambda count: not space.holds(count, length, update))
    if fewer:
        found.append(f"{fewer} x {length}")
    shorter = (length >> halvings for halvings in range(1, length.bit_length()))
    fitting = next((each for each in shorter if each >= LEAST_LENGTH and space.holds(batch, each, update)), None)
    if fitting is not None:
        found.append(f"{batch} x {fitting}")
    return found


def _options(space: SearchSpace, batch: int, length: int, update: str) -> list[str]:
    """The given options without which this batch would fit."""
    defaults = {name: default for name, default, row in rows() if row.hinders}
    given = {name: value for name, default in defaults.items() if (value := getattr(space.config, name)) != default}

    def hinders(name: str) -> bool:
        other: dict[str, Any] = {name: defaults[name]}
        return replace(space, config=replace(space.config, **other)).holds(batch, length, update)

    return [f"leave out {name}={value!r}" for name, value in given.items() if hinders(name)]
