"""Prints rows as Markdown: the measured rows of a declared table, or all rows of a file.

    python benchmarks/table.py                     the rows of benchmarks/results/step.jsonl
    python benchmarks/table.py FILE TABLE ...      tables of benchmarks/tables.py, from a file of rows
    python benchmarks/table.py FILE TABLE --brief  only the most important columns

Ratios are computed only between rows of the same commit.
"""
from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rows
from tables import TABLES, Spec, Table
from tabulate import tabulate

from megacompile.errors import MegacompileError
from megacompile.ir.plan import kept_residuals
from megacompile.picture import check_matplotlib

#: The file of rows that is printed by default.
DEFAULT = Path(__file__).parent / "results" / "step.jsonl"
Cell = Callable[["Measured"], str]


@dataclass(frozen=True)
class Measured:
    """A measured row of a table. `alone_tflops`: the rate of its templates without copies and updates (`--compute-only`);
    `native_tflops`: the rate of the fastest native row of the same size; `full_tflops`: the rate with full rows and the same
    device memory. Each is None if it was not measured."""

    spec: Spec
    row: rows.Row
    alone_tflops: float | None = None
    native_tflops: float | None = None
    full_tflops: float | None = None

    def option(self, name: str) -> Any:
        """The value of an option in the table, or the actual value if the table leaves it open (such as layers="fit")."""
        value = self.spec.options.get(name)
        return self.row.get(name, value) if value in (None, "fit") else value


def measured(table: Table, found: Iterable[rows.Row], device: str) -> list[Measured]:
    """The measured rows of a table on one device, in the order of the table.

    If a row was measured several times, takes the last one at the commit with the most rows to compare it with (compute-only
    and native rows). A compute-only row belongs to the rows that run the same templates. That of a clipped step also belongs
    to steps with updates on arrival, if their plan runs the same templates."""
    found = [row for row in found if row["device"] == device and "options" in row]
    rates = rows.by_commit(row for row in found if "tflops" in row)
    natives: dict[tuple[Any, ...], float] = {}
    fulls: dict[tuple[Any, ...], float] = {}
    for each in rates.values():
        if _is_native(each["system"], each["options"]):
            natives[_size(each)] = max(each["tflops"], natives.get(_size(each), 0.0))
        elif each["options"].get("data") == "full":
            fulls[_budget(each)] = each["tflops"]
    has_native = any(_is_native(spec.system, spec.options) for spec in table.rows)
    result = []
    for spec in table.rows:
        own = spec.identity(device)
        same = [row for row in found if rows.identity(row["system"], row["options"], device) == own]
        if "compute_only" in spec.options or not same:
            continue
        alones = (spec.alone(), spec.alone().changed(overlap=None)) if spec.system == "megacompile" else ()
        identities = [each.identity(device) for each in alones]
        beside = [(row, _alone(identities, row, rates)) for row in same]
        has_alone = any(each in table.rows for each in alones[:1])
        partners = [(has_alone and alone is not None) + (has_native and _size(row) in natives) for row, alone in beside]
        row, alone = beside[max(zip(partners, range(len(same)), strict=True))[1]]  # the last one with the most partners
        result.append(Measured(spec, row, alone, natives.get(_size(row)), fulls.get(_budget(row))))
    return result


def _is_native(system: str, options: Mapping[str, Any]) -> bool:
    return system == "native" or options.get("through") == "native"


def _budget(row: rows.Row) -> tuple[Any, ...]:
    """A key that is equal for rows with the same model and the same device memory budget."""
    return *(row.get(key) for key in ("shape", "layers", "commit")), row["options"].get("device_memory")


def _alone(identities: Sequence[str], row: rows.Row, rates: Mapping[tuple[str, str | None], rows.Row]) -> float | None:
    """The TFLOPS of the first compute-only row, among these identities, that ran the same templates; None if there is none."""
    beside = (rates[key] for each in identities if (key := (each, row.get("commit"))) in rates)
    return next((each["tflops"] for each in beside if _computed(each) == _computed(row)), None)


def _computed(row: rows.Row) -> tuple[Any, ...]:
    """A key that is equal for rows that run the same templates equally often."""
    return (*(row.get(key) for key in ("micro_batch", "checkpoint_interval", "saved_layers", "token_chunk")), _residuals(row))


def _residuals(row: rows.Row) -> str:
    """Which residuals layers keep. Older rows have no such field and keep all."""
    return str(row.get("residuals", "all"))


def _size(row: rows.Row) -> tuple[Any, ...]:
    return *(row.get(key) for key in ("shape", "layers", "batch", "length", "commit")), row.get("options", {}).get("data")


def varying(specs: Sequence[Spec]) -> list[str]:
    """The options in which the rows of a table differ, in order of first appearance."""
    names = dict.fromkeys(name for spec in specs for name in spec.options)
    return [name for name in names if len({str(spec.options.get(name)) for spec in specs}) > 1 and name != "compute_only"]


# ---------------------------------------------------------------- columns

def _number(field: str, form: str) -> Cell:
    return lambda m: format(m.row[field], form) if m.row.get(field) is not None else ""


def _share(whole: Callable[[Measured], float | None]) -> Cell:
    def cell(m: Measured) -> str:
        base = whole(m)
        return f"{m.row['tflops'] / base:.3f}" if base and "tflops" in m.row else ""
    return cell


def _occupancy(m: Measured) -> str:
    return ", ".join(f"{lane} {share:.0%}" for lane, share in (m.row.get("occupancy") or {}).items())


def _tflops(m: Measured) -> str:
    return "failed" if "error" in m.row else format(m.row["tflops"], ".0f" if m.row["tflops"] >= 10 else ".3g")


def _commit(m: Measured) -> str:
    return str(m.row.get("commit") or "")


#: The columns of tables. A column that is empty in all rows is left out.
COLUMNS: Mapping[str, Cell] = {
    "TFLOPS": _tflops, "with attention": _number("tflops_with_attention", ".0f"),
    "of compute alone": _share(lambda m: m.alone_tflops),
    "of native": _share(lambda m: None if _is_native(m.spec.system, m.spec.options) else m.native_tflops),
    "tokens/s": _number("tokens_per_s", ",.0f"), "padding": _number("padding", ".0%"),
    "of full rows": _share(lambda m: m.full_tflops if m.spec.options.get("data") != "full" else None),
    "first step, s": _number("first_step_s", ".1f"), "slowest / median": _number("slowest_over_median", ".2f"),
    "step, s": _number("step_s", ".2f"), "predicted, s": _number("predicted_step_s", ".2f"),
    "GPU, GiB": _number("peak_device_gib", ".1f"), "predicted, GiB": _number("predicted_device_gib", ".1f"),
    "host, bytes/parameter": _number("host_bytes_per_parameter", ".1f"), "lanes busy": _occupancy,
    "SM, MHz": _number("sm_clock_mhz", ".0f"), "power, W": _number("power_w", ".0f"), "commit": _commit,
}
#: The columns of brief tables.
BRIEF = ("TFLOPS", "of compute alone", "of native", "tokens/s", "of full rows", "first step, s",
         "slowest / median", "step, s", "predicted, s", "GPU, GiB", "predicted, GiB", "commit")


def text(value: Any) -> str:
    """An option as it is printed. Options that are not given are empty."""
    return "" if value is None or value is False else "yes" if value is True else str(value)


def markdown(table: Table, found: Sequence[rows.Row], brief: bool = False) -> str:
    """The table with its measured rows, for each device, followed by the errors of rows that failed."""
    parts = []
    for device in dict.fromkeys(row["device"] for row in found):
        if lines := measured(table, found, device):
            parts.append(f"{table.title} ({device})\n\n{_table(table, lines, brief)}")
    return "\n\n".join(parts) or f"{table.title}: no row has been measured"


def _table(table: Table, lines: Sequence[Measured], brief: bool) -> str:
    names = varying(table.rows)
    systems = len({spec.system for spec in table.rows}) > 1
    cells = {head: [cell(m) for m in lines] for head, cell in COLUMNS.items() if not brief or head in BRIEF}
    given = {name.replace("_", " "): [text(m.option(name)) for m in lines] for name in names}
    cells = {**({"system": [m.spec.system for m in lines]} if systems else {}),
             **{head: column for head, column in {**given, **cells}.items() if any(column)}}
    failed = [f"{m.spec.label}: {m.row['error']}" for m in lines if "error" in m.row]
    return "\n\n".join([tabulate(cells, headers="keys", tablefmt="github", disable_numparse=True), *failed])


# ---------------------------------------------------------------- all rows of a file

STEP_COLUMNS = {"tokens": "tokens", "layers": "layers", "K": "checkpoint_interval", "residuals kept": "kept",
                "step": "step", "TFLOPS": "tflops", "step, s": "step_s", "GPU, GiB": "peak_device_gib",
                "predicted": "predicted_device_gib",
                "checkpoints": "checkpoint_gib", "host, bytes/parameter": "host_bytes_per_parameter", "commit": "commit"}


def _is_plain(row: rows.Row) -> bool:
    return "error" not in row and row.get("system") == "megacompile"


def plain(found: Iterable[rows.Row]) -> str:
    """A table of every measured row of megacompile, in the order of the file."""
    lines = []
    for row in filter(_is_plain, found):
        kind = f"train_step, {row['waves']} waves" if row.get("train_step") else "loop"
        clip = "updates on arrival" if row.get("overlap") else "clipped" if row["max_grad_norm"] else "unclipped"
        shown = row | dict(tokens=f"{row['batch']} x {row['length']}",
                           kept=kept_residuals(row["saved_layers"], _residuals(row)),
                           step="compute alone" if row["compute_only"] else f"{kind}, {clip}",
                           tflops=f"{row['tflops']:.0f}", step_s=f"{row['step_s']:.2f}")
        shown |= {size: f"{row[size]:.1f}" for size in ("peak_device_gib", "predicted_device_gib", "checkpoint_gib")}
        lines.append([shown[key] for key in STEP_COLUMNS.values()])
    return tabulate(lines, list(STEP_COLUMNS), tablefmt="github", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=DEFAULT, help="file of rows (default: that of step.py)")
    parser.add_argument("tables", nargs="*", metavar="TABLE",
                        help=f"tables to print: {', '.join(TABLES)} (default: all rows as they are)")
    parser.add_argument("--brief", action="store_true", help="print only the most important columns")
    given = parser.parse_args()
    if unknown := set(given.tables) - set(TABLES):
        parser.error(f"unknown table {', '.join(sorted(unknown))}: choose from {', '.join(TABLES)}")
    found = rows.read(given.file)
    if not given.tables and not any(map(_is_plain, found)):
        parser.error(f"{given.file} has no rows of benchmarks/step.py: give another file, or tables to print")
    print("\n\n".join(markdown(TABLES[name], found, given.brief) for name in given.tables) if given.tables else plain(found))


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


if __name__ == "__main__":
    main()
