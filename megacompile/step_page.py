"""Writes steps as one HTML page that loads nothing: lanes over time, with zoom, the program beside them, and the device memory.

    save({"simulated": schedule.simulate(), "measured": recording.timeline()}, Path("step.html"), schedule)

Each bar is an instruction: pointing at it shows its bytes, and what it waits for; a click shows its line of the program.
`step_page.html` has the page itself, and `DATA` in it stands for what `data` returns.
"""
from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacompile.errors import ArgumentError
from megacompile.ir.printing import describe
from megacompile.ir.program import Lane, Program, argument, nodes, op_of
from megacompile.picture import COLORS
from megacompile.predict import cost
from megacompile.predict.simulate import Item, Timeline
from megacompile.timeline import KINDS, LANES, arrows, kind_of

if TYPE_CHECKING:
    from megacompile.scheduling import Schedule

#: The bytes of its tile that an instruction of a kind moves.
_MOVED = {"weights to the device": "weight_bytes", "weights from all GPUs": "weight_bytes",
          "gradients to the host": "gradient_bytes", "updated weights to the host": "weight_bytes",
          "optimizer state moved": "state_bytes", "optimizer state from disk": "disk_bytes",
          "optimizer state to disk": "disk_bytes"}
_KINDS = list(dict.fromkeys(KINDS.values()))


def save(timelines: Mapping[str, Timeline], path: Path, schedule: Schedule) -> None:
    """Writes the last step of each timeline. Raises `ArgumentError` if the file cannot be written."""
    page = resources.files("megacompile").joinpath("step_page.html").read_text(encoding="utf-8")
    shown = json.dumps(data(timelines, schedule), separators=(",", ":")).replace("<", "\\u003c")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page.replace("DATA", shown), encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"{path} cannot be written ({error.strerror}): give another file") from error


def data(timelines: Mapping[str, Timeline], schedule: Schedule) -> dict[str, Any]:
    """What the page shows, as JSON. Times are in seconds from the beginning of the step."""
    program = schedule.program()
    text, line_of = _lines(program)
    return dict(title=schedule.title(), kinds=[[kind, COLORS[kind]] for kind in _KINDS], text=text,
                steps=[_step(name, timeline, program, line_of) | dict(memory=_memory(timeline, schedule))
                       for name, timeline in timelines.items()],
                base=_held_bytes(schedule))


def _lines(program: Program) -> tuple[list[str], dict[tuple[str, str], int]]:
    """The lines of the program's sections, and the line of each node, by section and name."""
    text: list[str] = []
    line_of: dict[tuple[str, str], int] = {}
    for section, graph in program.sections.items():
        line_of |= {(section, node.name): len(text) + 1 + number for number, node in enumerate(nodes(graph))}
        text += program.text(section).splitlines()
    return text, line_of


def _step(name: str, timeline: Timeline, program: Program, line_of: Mapping[tuple[str, str], int]) -> dict[str, Any]:
    begin, end = timeline.window
    shown = [item for item in timeline.items if kind_of(item) is not None and begin < item.end_s and item.start_s < end]
    number = {item: at for at, item in enumerate(shown)}
    waits: dict[Item, list[int]] = {}
    for arrow in arrows(timeline):
        if arrow.target in number and arrow.source in number:
            waits.setdefault(arrow.target, []).append(number[arrow.source])
    chain = set(timeline.chain())
    lanes = [lane for lane in LANES if any(item.lane == lane for item in shown)]
    bars = [[lanes.index(item.lane), round(max(item.start_s, begin) - begin, 7), round(min(item.end_s, end) - begin, 7),
             _KINDS.index(kind_of(item) or ""), describe(item.node), line_of.get((item.section, item.node.name), -1),
             _bytes(item, program), waits.get(item, []), int(item in chain)] for item in shown]
    return dict(name=name, seconds=timeline.step_s, binds=str(timeline.binds), bars=bars,
                lanes=[[str(lane), timeline.occupancy(lane)] for lane in lanes])


def _bytes(item: Item, program: Program) -> int:
    """The bytes of a tile that an instruction moves; 0 if it moves none."""
    tile = program.tiles.get(str(argument(item.node, "tile")))
    field = _MOVED.get(kind_of(item) or "")
    return 0 if tile is None or field is None else getattr(tile, field)


def _held_bytes(schedule: Schedule) -> int:
    """Bytes of device memory that a step holds from its beginning to its end: slots and sums."""
    estimate = schedule.planner.estimate(schedule.plan)
    return estimate.slots + estimate.accumulators


def _memory(timeline: Timeline, schedule: Schedule) -> list[list[float]]:
    """Times of the step and the estimated bytes of device memory from each on. A forward leaves its outputs, and residuals if
    it keeps them; the backward of the same call and micro-batch releases both. While an instruction computes, it takes its
    peak."""
    plan, templates = schedule.plan, schedule.templates
    fused = schedule.planner.fused
    begin, end = timeline.window
    kept: dict[tuple[str, int], int] = {}
    changes: list[tuple[float, int]] = []
    for item in timeline.items:
        op = op_of(item.node).name
        name, mb = argument(item.node, "template"), argument(item.node, "mb")
        if item.lane != Lane.COMPUTE or name not in templates or mb is None or not begin <= item.start_s < end:
            continue
        template, rows = templates[name], plan.micro_batches[mb]
        key = str(argument(item.node, "call")), mb
        start, stop = item.start_s - begin, min(item.end_s, end) - begin
        peak = cost.peak_bytes(template, template.variant(op), rows, plan.length, fused)
        changes += [(start, peak), (stop, -peak)]
        if op in ("forward", "forward_saving"):
            kept[key] = cost.output_bytes(template, rows, plan.length)
            kept[key] += cost.residual_bytes(template, rows, plan.length, plan.residuals) if op == "forward_saving" else 0
            changes.append((stop, kept[key]))
        elif key in kept:
            changes.append((stop, -kept.pop(key)))
    found, held = [[0.0, float(_held_bytes(schedule))]], _held_bytes(schedule)
    for when, those in itertools.groupby(sorted(changes), key=lambda change: change[0]):
        held += sum(change for _, change in those)
        found.append([round(when, 7), float(held)])
    return found
