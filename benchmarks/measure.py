"""Measures the rows of a table that a file does not have yet, and prints the table: `python benchmarks/measure.py --help`.

Rows with the same model share a process and the model. If a row crashes its process, a new process measures the rows after it.
"""
from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Annotated, Any

import rows
import typer
from shapes import SHAPES
from table import draw, markdown
from tables import MODULES, TABLES, Spec, Table

import megacompile
from megacompile.errors import ArgumentError, MegacompileError
from megacompile.inspection import choose
from megacompile.picture import check_matplotlib

#: Time limit for a row in seconds. A row that takes longer is assumed to hang.
ROW_LIMIT_S = 20 * 60.0
#: Time in seconds for a process to end, and to print why it failed, after its last row.
_LAST_WORDS_S = 5.0


def missing(table: Table, found: Collection[rows.Row], device: str, retry: bool = False) -> list[Spec]:
    """The rows of a table that are not among `found`; with `retry`, also those that failed."""
    known = {key for key, row in rows.latest(found).items() if not (retry and "error" in row)}
    return [spec for spec in table.rows if spec.identity(device) not in known]


def run(table: Table, output: Path, *, limit_s: float | None = None, retry: bool = False,
        report: Callable[[str], object] = print) -> int:
    """Adds the missing rows of a table to a file, one by one, and returns the number that are still missing after `limit_s`
    seconds. A row that fails is added with its `error`. `report` is called with progress messages."""
    end = time.monotonic() + (float("inf") if limit_s is None else limit_s)
    machine = described_machine()
    wanted = missing(table, rows.read(output), machine["device"], retry)
    report(f"{table.title}: {len(table.rows) - len(wanted)} of {len(table.rows)} rows are in {output}")
    while wanted and time.monotonic() < end:
        together = [spec for spec in wanted if spec.model == wanted[0].model]
        for spec, row in zip(together, measured(together, end), strict=False):
            wanted.remove(spec)
            if "options" not in row:  # the process died before it could describe the row
                row = dict(system=spec.system, options=spec.identifying(), commit=rows.commit()) | row | machine
            rows.append(output, row)
            report(f"{spec.label}: {row['error'] if 'error' in row else str(row['tflops']) + ' TFLOPS'}")
    if wanted:
        report(f"the time limit is reached and {len(wanted)} rows are still missing: run the same command again")
    return len(wanted)


def measured(specs: Sequence[Spec], end: float) -> Iterator[rows.Row]:
    """The rows that one process measures, as they arrive. If a row ends the process, it has an `error` and is the last one. No
    rows arrive after the time `end` (of `time.monotonic`)."""
    command = [sys.executable, "-m", MODULES[specs[0].system]]
    for number, spec in enumerate(specs):
        command += [*([rows.THEN] if number else []), *spec.arguments()]
    with tempfile.TemporaryFile("w+") as said, subprocess.Popen(
            command, env=_environment(), stdout=subprocess.PIPE, stderr=said, text=True) as process:
        try:
            for _ in specs:
                row = _next(process, min(end - time.monotonic(), ROW_LIMIT_S))
                if row is None and time.monotonic() >= end:
                    return
                yield _end(process, said) if row is None else row
                if row is None:
                    return
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_WORDS_S)
            process.kill()
            _repeat(process, said)


def _next(process: subprocess.Popen[str], limit_s: float) -> rows.Row | None:
    """The next row that a process prints; None if the process ends before, or is killed after `limit_s` seconds."""
    assert process.stdout is not None, "its output is a pipe"
    timer = threading.Timer(max(0.0, limit_s), process.kill)
    timer.start()
    try:
        for line in process.stdout:
            if (row := _row(line)) is not None:
                return row
        return None
    finally:
        timer.cancel()


def _row(line: str) -> rows.Row | None:
    """The row that a line contains, or None if it is something else."""
    try:
        found: Any = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _end(process: subprocess.Popen[str], said: IO[str]) -> rows.Row:
    """The failed row of a process that has ended."""
    code = process.wait()
    if code == -signal.SIGKILL:
        return dict(error=f"took more than {ROW_LIMIT_S / 60:.0f} minutes, or was killed")
    why = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    said.seek(0)
    lines = said.read().strip().splitlines()
    return dict(error=f"the process ended with {why}" + (f": {lines[-1]}" if lines else ""))


def _repeat(process: subprocess.Popen[str], said: IO[str]) -> None:
    """Prints the stderr of a process that failed."""
    if process.wait() not in (0, -signal.SIGKILL):
        said.seek(0)
        print(said.read(), file=sys.stderr)


def described_machine() -> rows.Row:
    """The fields of a row about the machine. They are read in a separate process, since CUDA keeps half a gigabyte of device
    memory once it is used."""
    done = subprocess.run([sys.executable, "-m", "rows"], env=_environment(), capture_output=True, text=True,
                          check=True)
    return dict(json.loads(done.stdout))


def _environment() -> dict[str, str]:
    root = Path(megacompile.__file__).parents[1]  # so that the process imports this copy of megacompile
    here = Path(__file__).resolve().parent
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(root), *filter(None, [os.environ.get("PYTHONPATH")])])}


app = typer.Typer(add_completion=False)


@app.command()
def main(
    name: Annotated[str, typer.Argument(metavar="TABLE", help=f"The table to measure: {', '.join(TABLES)}.")],
    output: Annotated[Path, typer.Option(
        dir_okay=False, help="File with the measured rows (JSON lines). New rows are appended.")] = Path("bench.jsonl"),
    shape: Annotated[str | None, typer.Option(
        help="Model shape for rows that do not name one, such as tiny.", show_default="the table's")] = None,
    limit_minutes: Annotated[float | None, typer.Option(
        min=0.0, help="Time limit in minutes. Run the same command again to continue. 0: only print the existing rows.",
        show_default="none")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Measure failed rows again.")] = False,
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="Also draw the table to this SVG file.")] = None,
) -> None:
    """Measure the missing rows of a benchmark table, and print the table."""
    try:
        if plot is not None:
            check_matplotlib()
        if shape is not None:
            choose(SHAPES, shape, "shape")
        table = choose(TABLES, name, "table").of_shape(shape)
        run(table, output, limit_s=None if limit_minutes is None else 60 * limit_minutes, retry=retry)
        print(markdown(table, rows.read(output)))
        if plot is not None:
            draw(table, rows.read(output), plot)
    except KeyboardInterrupt:
        print(f"stopped by Ctrl-C: the finished rows are in {output}", file=sys.stderr)
        raise typer.Exit(130) from None
    except MegacompileError as error:
        print(f"measure: {error}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, ArgumentError) else 1) from None


if __name__ == "__main__":
    app(prog_name="measure")
