"""Which tiles visit the device for their update: those that the user names, or as many as make a step faster.

The host's updates are bound by its memory bandwidth, which copies use too: a visit moves about as many bytes as an update on
the host. So visits gain most where the link is idle, and nothing where the host keeps up. All visits come before the next
forward's weights, which are copied in the same lane. Only a simulation says how many visits are best. """
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from megacompile.ir.plan import Plan
from megacompile.ir.program import Lane
from megacompile.planning.config import StreamConfig
from megacompile.planning.step_time import Pace


def named_device_updates(config: StreamConfig, trained: Sequence[str], resident_state: Sequence[str],
                         update: str) -> tuple[str, ...]:
    """The tiles that the user has named, in the order of the next forward, without those that the device updates anyway. Empty
    for updates on arrival."""
    named = config.visiting_state or ()
    on_host = (tile for tile in trained if tile not in resident_state) if update == "step" else ()
    return tuple(tile for tile in on_host if named == "all" or tile in named)


def fastest_device_updates(plans: Sequence[Plan], pace: Pace, whole_step: bool, worth: float) -> Plan:
    """The fastest of `plans`, each of which lets one tile more visit than the plan before it. The first plan, if no other is
    faster by a factor of `worth`, or if the host's updates delay its step by less than that."""
    if len(plans) == 1:
        return plans[0]
    times = pace.times(plans[0], whole_step)
    if times.critical_s[Lane.CPU] * worth <= (worth - 1) * times.step_s:
        return plans[0]

    def seconds(count: int) -> float:
        return pace.cautious_s(plans[count], whole_step)

    # Seconds fall up to the best count and rise after it.
    best = bisect_left(range(len(plans) - 1), True, key=lambda count: seconds(count + 1) >= seconds(count))
    return plans[best] if seconds(best) * worth < seconds(0) else plans[0]
