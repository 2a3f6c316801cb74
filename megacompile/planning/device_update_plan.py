"""Which tiles visit the device for their update: those that the user names, or as many as make a step faster.

The host's updates are bound by its memory, which copies read and write too: a visit moves about as many bytes as the update at
home, beside it. So visits are worth most where the link would stand idle, and nothing where the host keeps up; and all of them
come before the next forward's weights, in the lane of both. How many serve best only a simulation says.
"""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from megacompile.ir.plan import Plan
from megacompile.ir.program import Lane
from megacompile.planning.config import StreamConfig
from megacompile.planning.step_time import Pace


def named_visits(config: StreamConfig, trained: Sequence[str], resident_state: Sequence[str], update: str) -> tuple[str, ...]:
    """Those that the user has named, in the order of the next forward. None on arrival; none that the device updates anyway."""
    named = config.visiting_state or ()
    at_home = (tile for tile in trained if tile not in resident_state) if update == "step" else ()
    return tuple(tile for tile in at_home if named == "all" or tile in named)


def most_helpful_visits(plan: Plan, trained: Sequence[str], pace: Pace, whole_step: bool, worth: float,
                        fitted: Callable[[Plan], Plan], fits: Callable[[Plan], bool]) -> Plan:
    """The plan, with visits of the first so many tiles that it updates on the host: as many as make it fastest, if it is faster
    by a factor of `worth`. The same plan where the host's updates hold it up no longer than that. `fitted` gives a
    plan with visits room for the memory that they take, whatever their number, if that can be had."""
    times = pace.times(plan, whole_step)
    if plan.update != "step" or plan.visiting_state or times.critical_s[Lane.CPU] * worth <= (worth - 1) * times.step_s:
        return plan
    tiles = [tile for tile in trained if tile not in plan.resident_state and tile not in plan.host_sums]
    visited = fitted(replace(plan, visiting_state=tuple(tiles[:1])))
    if not fits(visited):
        return plan
    plans = [plan, *(replace(visited, visiting_state=tuple(tiles[:count])) for count in range(1, len(tiles) + 1))]

    def seconds(count: int) -> float:
        return pace.cautious_s(plans[count], whole_step)

    # Ever fewer seconds up to the best, ever more beyond.
    best = bisect_left(range(len(tiles)), True, key=lambda count: seconds(count + 1) >= seconds(count))
    return plans[best] if seconds(best) * worth < seconds(0) else plan
