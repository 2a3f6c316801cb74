"""What a row says of moments on disk: bytes that a step reads and writes, measured and planned, and the seconds of both."""
from __future__ import annotations

from typing import Any

from megacompile.bench.rows import Row
from megacompile.ir.program import Lane, argument, find
from megacompile.predict.hardware import Hardware
from megacompile.predict.simulate import Timeline


def of_the_disk(model: Any, simulated: Timeline | None) -> Row:
    """The part of a row about a streamed model that has trained, with its simulated steps; {} if all moments are in memory.

    GB of this process (10^9 bytes): those of a step on average, and those that the program names. The rates are those that the
    prediction used: what `megacompile calibrate --disk` has measured, or else a profile's. `predicted_disk_s`: how long each
    lane of the disk works in a simulated step."""
    handle = model.megacompile
    plan, stats, trained = handle.plan, handle.stats, handle.streamed.step.trained
    if not plan.disk_state or trained is None:
        return {}
    steps, program = handle.streamed.step.count, trained.program
    hardware = Hardware.known(handle.streamed.backend.device)

    def planned(op: str) -> int:
        return sum(program.tiles[argument(node, "tile")].disk_bytes for graph in program.sections.values()
                   for node in find(graph, op))

    busy = {} if simulated is None else {"read": simulated.busy_s[Lane.DISK_READ], "write": simulated.busy_s[Lane.DISK_WRITE]}
    return dict(
        disk_tiles=len(plan.disk_state), state_slabs=plan.state_slabs, disk_gib=round(stats["disk_bytes"] / 2**30, 2),
        disk_gb_per_step={way: round(stats[f"disk_bytes_{word}"] / steps / 1e9, 4)
                          for way, word in (("read", "read"), ("write", "written"))},
        predicted_disk_gb_per_step={way: round(planned(f"{way}_state") / 1e9, 4) for way in ("read", "write")},
        predicted_disk_s={way: round(seconds, 3) for way, seconds in busy.items()},
        disk_rates_gb_s=None if hardware is None else {way: round(rate / 1e9, 3) for way, rate in hardware.disk.items()})
