"""Draws a table: TFLOPS against the option that varies, or as bars."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megacompile.bench import rows
from megacompile.bench.table import Measured, measured, text, varying
from megacompile.bench.tables import Table
from megacompile.errors import MegacompileError
from megacompile.picture import check_matplotlib


def draw(table: Table, found: Sequence[rows.Row], path: Path) -> None:
    """Draws the measured rows of a table for every device. The suffix of the path selects the format (.svg). Rows that failed
    are left out. Raises `MegacompileError` without matplotlib, and if there is nothing to draw."""
    check_matplotlib()
    from matplotlib.figure import Figure

    lines = {device: [m for m in measured(table, found, device) if "tflops" in m.row]
             for device in dict.fromkeys(row["device"] for row in found)}
    lines = {device: each for device, each in lines.items() if each}
    if not lines:
        raise MegacompileError(f"no row of the table {table.title!r} has been measured: measure some before drawing")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_title(f"{table.title} ({', '.join(lines)})" if len(lines) == 1 else table.title)
    many = len(lines) > 1
    named = [((f"{device}, " if many else "") + _label(m, table), m) for device, each in lines.items() for m in each]
    (_curves if table.x is not None else _bars)(axes, table, named)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _label(m: Measured, table: Table) -> str:
    """The options in which a row differs from others, without the option on the axis. For an axis of lengths, the batch is left
    out as well, since it follows from the length at constant tokens per step."""
    hidden = (table.x, "batch") if table.x == "length" else (table.x,)
    given = [(name, m.spec.options.get(name)) for name in varying(table.rows) if name not in hidden]
    words = [name.replace("_", " ") if value is True else f"{name.replace('_', ' ')} {value}"
             for name, value in given if text(value)]
    return ", ".join([m.spec.system, *words])


def _curves(axes: Any, table: Table, named: Sequence[tuple[str, Measured]]) -> None:
    assert table.x is not None
    ticks = list(dict.fromkeys(str(m.option(table.x) or "all") for _, m in named))
    for label in dict.fromkeys(label for label, _ in named):
        points = [(ticks.index(str(m.option(table.x) or "all")), m.row["tflops"]) for each, m in named if each == label]
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    axes.set_xticks(range(len(ticks)), ticks)
    axes.set_xlabel(table.x.replace("_", " "))
    axes.set_ylabel("TFLOPS")
    axes.set_ylim(bottom=0)
    axes.legend()


def _bars(axes: Any, table: Table, named: Sequence[tuple[str, Measured]]) -> None:
    places = range(len(named))
    axes.barh(places, [m.row["tflops"] for _, m in named])
    axes.set_yticks(places, [label for label, _ in named], fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel("TFLOPS")
