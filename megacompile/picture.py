"""Draws steps: a row for each lane, instructions colored by purpose, several timelines on one time axis.

    save({"simulated": compiled.simulate(), "measured": recording.timeline()}, Path("step.svg"), title="...")

Layers alternate in lightness and are numbered where there is room ("in" and "out" are the prologue and the epilogue); white
marks separate micro-batches. A black line under an instruction means that the step waits for it: where the line runs under
compute, faster copies would not help. Needs matplotlib.
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacompile.errors import ArgumentError, MegacompileError
from megacompile.ir.program import Lane, argument
from megacompile.predict.simulate import Item, Timeline
from megacompile.timeline import KINDS, LANES, kind_of

COLORS = {
    "weights to the device": "#4477aa", "weights from all GPUs": "#2f5580",
    "forward": "#4a9c54", "forward, residuals kept": "#7fa63d",
    "loss and its gradient": "#9b4f96", "recompute and backward": "#dd6a4b", "backward": "#c24a68",
    "gradients summed": "#8a8a8a", "gradients summed over GPUs": "#7d6bb0", "gradients summed over hosts": "#a9539c",
    "norms and losses of all GPUs": "#5a4d80",
    "gradients to the host": "#52a9c9", "clip": "#333333",
    "checkpoints to the host and back": "#b0c4de", "update": "#cfae3c",
    "optimizer state from disk": "#8c6d4f", "optimizer state to disk": "#6b4f3a",
    "optimizer state moved": "#a8825e", "updated weights to the host": "#6fbfa5"}
assert set(COLORS) == set(KINDS.values()), "every kind of instruction needs a color"

FORMATS = (".svg", ".png", ".pdf")
_WIDTH_IN, _ROW_IN, _PIXELS = 12.0, 0.36, 1000.0
#: Heights of rows other than 1. The compute lane has the most to show.
_HEIGHT = {Lane.COMPUTE: 1.5}
_GAP = 0.28


def check(path: Path) -> None:
    """Raises `ArgumentError` for a file suffix that is not in `FORMATS`, `MegacompileError` if matplotlib is missing."""
    if path.suffix not in FORMATS:
        raise ArgumentError(f"a picture cannot be written as {path.suffix or 'a file without a suffix'}: give a file name that "
                            f"ends in {', '.join(FORMATS)}")
    check_matplotlib()


def check_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MegacompileError("drawing needs matplotlib: pip install matplotlib") from error


@dataclass(frozen=True)
class Bar:
    """One rectangle: an instruction, or several of one layer that are too short to draw separately. Times are in seconds from
    the start of the step."""

    begin: float
    end: float
    kind: str
    subject: str  # the layer's number, "in" or "out"


def _bars(timeline: Timeline, lane: Lane, too_short_s: float) -> Iterator[Bar]:
    """The bars of a lane in the last step, in order."""
    origin, until = timeline.window
    last: Bar | None = None
    for item in timeline.items:
        kind = kind_of(item)
        begin, end = max(item.start_s, origin) - origin, min(item.end_s, until) - origin
        if kind is None or item.lane != lane or end <= begin:
            continue
        bar = Bar(begin, end, kind, _subject(item))
        if last is not None and (last.kind, last.subject) == (bar.kind, bar.subject) and (
                begin - last.end < too_short_s and end - begin < 6 * too_short_s):
            last = Bar(last.begin, end, kind, bar.subject)
            continue
        if last is not None:
            yield last
        last = bar
    if last is not None:
        yield last


def _runs(bars: Iterable[Bar]) -> Iterator[list[Bar]]:
    """Groups bars that follow each other without a gap and belong to one layer: its micro-batches."""
    run: list[Bar] = []
    for bar in bars:
        if run and (run[-1].end, run[-1].kind, run[-1].subject) != (bar.begin, bar.kind, bar.subject):
            yield run
            run = []
        run.append(bar)
    if run:
        yield run


def _subject(item: Item) -> str:
    """"3" for "model.layers.3", "in" for the prologue, "out" for the epilogue."""
    name = str(argument(item.node, "call") or argument(item.node, "tile") or "")
    number = re.search(r"(\d+)$", name)
    return number[1] if number else {"prologue": "in", "epilogue": "out"}.get(name, name)


def draw(timelines: Mapping[str, Timeline], title: str = "") -> Any:
    """The last step of each timeline, one below the other, as a matplotlib `Figure`. Raises `MegacompileError` without
    matplotlib."""
    check_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    longest = max(timeline.step_s for timeline in timelines.values())
    lanes = {name: [lane for lane in LANES if any(True for _ in _bars(timeline, lane, 0.0))]
             for name, timeline in timelines.items()}
    heights = [_ROW_IN * (_bottom(rows) + 1.6) for rows in lanes.values()]
    figure = Figure(figsize=(_WIDTH_IN, sum(heights) + 1.35), layout="constrained")
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    scale, unit = (1.0, "s") if longest >= 1 else (1e3, "ms")
    for axes, (name, timeline) in zip(panels, timelines.items(), strict=True):
        _draw_panel(axes, timeline, lanes[name], longest, scale)
        axes.set_title(f"{name}: {timeline.step_s * scale:.3g} {unit} a step; {timeline.binds} binds", loc="left", fontsize=10)
    panels[-1].set_xlabel(f"time in the step, {unit}")
    kinds = {kind_of(item) for timeline in timelines.values() for item in timeline.items}
    handles: list[Any] = [Patch(color=color, label=kind) for kind, color in COLORS.items() if kind in kinds]
    handles.append(Line2D([], [], color="black", linewidth=1.6, label="what the step waits for"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    if title:
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return figure


def _bottom(lanes: list[Lane]) -> float:
    return sum(_HEIGHT.get(lane, 1.0) + _GAP for lane in lanes)


def _draw_panel(axes: Any, timeline: Timeline, lanes: list[Lane], longest: float, scale: float) -> None:
    pixel = longest / _PIXELS
    chain = [item for item in timeline.chain() if kind_of(item) is not None]
    top, ticks = 0.0, []
    for lane in lanes:
        height = _HEIGHT.get(lane, 1.0)
        bars = list(_bars(timeline, lane, pixel))
        # Bars have a minimum width, so that none vanishes between pixels.
        axes.broken_barh([(bar.begin * scale, max(bar.end - bar.begin, 1.2 * pixel) * scale) for bar in bars], (top, height),
                         facecolors=[_shade(bar) for bar in bars], linewidth=0)
        digits = {bar.kind: len(bar.subject) for bar in sorted(bars, key=lambda bar: len(bar.subject)) if bar.subject.isdigit()}
        for run in _runs(bars):
            begin, end, subject = run[0].begin, run[-1].end, run[0].subject
            axes.vlines([bar.end * scale for bar in run[:-1]], top + 0.75 * height, top + height, color="white", linewidth=0.8)
            letters = digits[run[0].kind] if subject.isdigit() else len(subject)  # all layers are numbered, or none
            if end - begin > (6.5 * letters + 1) * pixel:
                axes.text((begin + end) / 2 * scale, top + 0.45 * height, subject, color="white", fontsize=7,
                          ha="center", va="center_baseline", clip_on=True)
        waits = [(begin * scale, (end - begin) * scale) for begin, end in _joined(timeline, chain, lane, pixel)]
        axes.broken_barh(waits, (top + height + 0.03, 0.07), facecolors="black", linewidth=0)
        axes.text(longest * scale * 1.006, top + height / 2, f"{timeline.occupancy(lane):.0%} busy", va="center", fontsize=8)
        ticks.append(top + height / 2)
        top += height + _GAP
    _draw_sections(axes, timeline, scale)
    axes.set_xlim(0, longest * scale)
    axes.set_ylim(top, -0.95)
    axes.set_yticks(ticks, [str(lane) for lane in lanes])
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelbottom=True)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _shade(bar: Bar) -> tuple[float, float, float]:
    """The color of the bar's kind, lighter for every other layer."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(COLORS[bar.kind])
    lighter = 0.22 if bar.subject.isdigit() and int(bar.subject) % 2 else 0.0
    return red + (1 - red) * lighter, green + (1 - green) * lighter, blue + (1 - blue) * lighter


def _joined(timeline: Timeline, chain: list[Item], lane: Lane, gap: float) -> list[tuple[float, float]]:
    """The intervals in which the step waits for a lane, in seconds from its start. Gaps shorter than `gap` are closed."""
    origin, until = timeline.window
    found: list[tuple[float, float]] = []
    for item in sorted((item for item in chain if item.lane == lane), key=lambda item: item.start_s):
        begin, end = max(item.start_s, origin) - origin, min(item.end_s, until) - origin
        if found and begin - found[-1][1] < gap:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif end > begin:
            found.append((begin, end))
    return found


def _draw_sections(axes: Any, timeline: Timeline, scale: float) -> None:
    """Marks above the lanes when each section computes."""
    origin, until = timeline.window
    computed = [i for i in timeline.items if i.lane == Lane.COMPUTE and kind_of(i) is not None and i.end_s > origin]
    for section in dict.fromkeys(item.section for item in computed):
        own = [item for item in computed if item.section == section]
        begin, end = max(own[0].start_s, origin) - origin, min(max(i.end_s for i in own), until) - origin
        axes.annotate("", (begin * scale, -0.3), (end * scale, -0.3),
                      arrowprops={"arrowstyle": "|-|,widthA=0.15,widthB=0.15", "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0})
        axes.text((begin + end) / 2 * scale, -0.42, section.replace("_", " "), ha="center", va="bottom", fontsize=8)


def save(timelines: Mapping[str, Timeline], path: Path, title: str = "") -> None:
    """Draws timelines into a file; its suffix selects the format. Raises what `check` raises, and `ArgumentError` if the file
    cannot be written."""
    check(path)
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "megacompile"}):  # equal pictures get equal bytes
        figure = draw(timelines, title)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise ArgumentError(f"{path} cannot be written ({error.strerror}): give another file") from error
