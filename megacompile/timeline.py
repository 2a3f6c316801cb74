"""Writes simulated or recorded timelines as traces for Perfetto, and classifies instructions for pictures (`picture.py`).

    save_trace({"simulated": compiled.simulate(), "measured": recording.timeline()}, Path("step.json"))

In a trace each timeline is a process and each lane is a thread, with the same names in both. An arrow leads from the
instruction that an event covers to the first instruction after a wait for it. Open the file at https://ui.perfetto.dev or
chrome://tracing.
"""
from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacompile.errors import ArgumentError
from megacompile.ir.ops import UPDATE_OPS
from megacompile.ir.printing import describe
from megacompile.ir.program import Lane, op_of, place_of
from megacompile.predict.simulate import Item, Timeline

#: The lanes from top to bottom, in the order in which weights and gradients pass through them.
LANES = (Lane.PACK, Lane.H2D, Lane.COLLECTIVE, Lane.COMPUTE, Lane.D2H, Lane.DISK_READ, Lane.CPU, Lane.DISK_WRITE)
#: The purpose of an instruction, by op. Ops that are not listed only order or keep values and take no significant time.
KINDS: dict[str, str] = {
    **dict.fromkeys(("pack", "prefetch", "prefetch_routed", "pack_shard", "prefetch_shard"), "weights to the device"),
    **dict.fromkeys(("gather", "gather_resident"), "weights from all GPUs"),
    "forward": "forward", "forward_saving": "forward, residuals kept", "evaluate": "forward", "outputs": "forward",
    "loss": "loss and its gradient",
    "recompute_backward": "recompute and backward", "backward": "backward",
    "zeros": "gradients summed", "scale": "gradients summed", "reduce": "gradients summed", "accumulate": "gradients summed",
    "add_to_sum": "gradients summed", "norms_of_sum": "gradients summed",
    "reduce_scatter": "gradients summed over GPUs", "all_reduce": "gradients summed over hosts",
    **dict.fromkeys(("share_norms", "share_host_norms", "share_loss"), "norms and losses of all GPUs"),
    "offload": "gradients to the host", "offload_norms": "gradients to the host",
    **dict.fromkeys(("stash", "fetch"), "checkpoints to the host and back"),
    "clip": "clip", **dict.fromkeys((*UPDATE_OPS, "update_moments", "momentum", "gather_momentum"), "update"),
    "read_state": "optimizer state from disk", "write_state": "optimizer state to disk",
    "fetch_state": "optimizer state moved", "store_state": "optimizer state moved", "fetch_gradients": "optimizer state moved",
    **dict.fromkeys(("hold", "fetch_held", "return_state"), "optimizer state moved"),
    "return_weights": "updated weights to the host",
    "offload_weights": "updated weights to the host"}
#: Ops that do no work.
MARKS = frozenset({"record", "wait", "enter", "leave", "release", "lease", "leased", "result", "resident", "resident_state",
                   "resident_gradients", "held", "stashed", "output_gradient", "total_loss", "announce"})


def kind_of(item: Item) -> str | None:
    """The purpose of an instruction, or None if it is not shown."""
    return KINDS.get(op_of(item.node).name)


@dataclass(frozen=True)
class Arrow:
    """An event between two lanes: `source` ends before `target` begins."""

    source: Item
    target: Item


def arrows(timeline: Timeline) -> Iterator[Arrow]:
    """An arrow for each pair of instructions that an event orders. It starts at the instruction that the event covers, or at
    the last shown instruction before it in that lane if it does no work. It ends at the first instruction that does work
    after the wait."""
    shown_last: dict[Lane, Item] = {}
    source_of: dict[Item, Item | None] = {}
    for item in timeline.items:
        if kind_of(item) is not None:
            shown_last[item.lane] = item
        source_of[item] = shown_last.get(item.lane)
    for lane in LANES:
        waited: dict[Item, None] = {}
        for item in (item for item in timeline.items if item.lane == lane):
            if item.waits_for is not None and item.waits_for.lane != lane:
                source = source_of.get(item.waits_for)
                waited |= {source: None} if source is not None else {}
            if kind_of(item) is not None:
                yield from (Arrow(source, item) for source in waited)
                waited.clear()


def trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """A Chrome trace of named timelines, with times in microseconds. The timelines are shifted so that their last steps begin
    at the same time."""
    latest = max((timeline.window[0] for timeline in timelines.values()), default=0.0)
    events: list[dict[str, Any]] = []
    number = itertools.count(1)
    for process, (name, timeline) in enumerate(timelines.items(), 1):
        shift = latest - timeline.window[0]
        events += _named("process", name, process, pid=process)
        for lane in dict.fromkeys(item.lane for item in timeline.items):
            events += _named("thread", str(lane), LANES.index(lane), pid=process, tid=LANES.index(lane))
        events += [{"ph": "X", "name": describe(item.node), "cat": kind_of(item), **_at(process, item, item.start_s + shift),
                    "dur": (item.end_s - item.start_s) * 1e6, "args": _details(item)}
                   for item in timeline.items if kind_of(item) is not None]
        for arrow in arrows(timeline):
            flow = {"name": "event", "cat": "event", "id": next(number)}
            # The arrow starts inside of the source, since the next instruction begins where the source ends.
            leaves = arrow.source.start_s + 0.999 * (arrow.source.end_s - arrow.source.start_s)
            arrives = max(leaves, arrow.target.start_s)
            events.append({"ph": "s", **flow, **_at(process, arrow.source, leaves + shift)})
            events.append({"ph": "f", "bp": "e", **flow, **_at(process, arrow.target, arrives + shift)})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _at(process: int, item: Item, seconds: float) -> dict[str, Any]:
    return {"pid": process, "tid": LANES.index(item.lane), "ts": seconds * 1e6}


def _named(what: str, name: str, position: int, **where: int) -> list[dict[str, Any]]:
    return [{"ph": "M", "name": f"{what}_name", **where, "args": {"name": name}},
            {"ph": "M", "name": f"{what}_sort_index", **where, "args": {"sort_index": position}}]


def _details(item: Item) -> dict[str, Any]:
    return {"step": item.step, "section": item.section, "node": item.node.name, "place": place_of(item.node)}


def save_trace(timelines: Mapping[str, Timeline], path: Path) -> None:
    """Writes a trace. Raises `ArgumentError` if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(trace(timelines)), encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"{path} cannot be written ({error.strerror}): give another file") from error
