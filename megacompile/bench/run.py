"""Measures the rows of a table that a file has not, each in a process of its own: what breaks one leaves the others alone."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

import megacompile
from megacompile.bench import rows
from megacompile.bench.tables import MODULES, Spec, Table

#: A row that takes longer hangs, or is not worth its time.
ROW_LIMIT_S = 20 * 60.0


def missing(table: Table, found: Collection[rows.Row], device: str, retry: bool = False) -> list[Spec]:
    """Rows that are not among those found; with `retry` those too that failed."""
    known = {key for key, row in rows.latest(found).items() if not (retry and "error" in row)}
    return [spec for spec in table.rows if spec.identity(device) not in known]


def run(table: Table, output: Path, *, limit_s: float | None = None, retry: bool = False,
        report: Callable[[str], object] = print) -> int:
    """Adds the missing rows of a table to a file, one by one, and returns how many are missing yet: those for which
    `limit_s` seconds were not enough. A row that fails is added with its `error`. `report` is told what happens."""
    end = time.monotonic() + (float("inf") if limit_s is None else limit_s)
    machine = described_machine()
    wanted = missing(table, rows.read(output), machine["device"], retry)
    report(f"{table.title}: {len(table.rows) - len(wanted)} of {len(table.rows)} rows are in {output}")
    for number, spec in enumerate(wanted):
        left = end - time.monotonic()
        row = measured(spec, min(left, ROW_LIMIT_S)) if left > 0 else None
        if row is None and left < ROW_LIMIT_S:
            report(f"time is up, and {len(wanted) - number} rows are missing yet: run the same again")
            return len(wanted) - number
        if row is None:
            row = dict(error=f"took more than {ROW_LIMIT_S / 60:.0f} minutes")
        if "options" not in row:  # it could not even say what it was
            row = dict(system=spec.system, options=spec.identifying(), commit=rows.commit()) | row | machine
        rows.append(output, row)
        report(f"{spec.label}: {row['error'] if 'error' in row else str(row['tflops']) + ' TFLOPS'}")
    return 0


def measured(spec: Spec, limit_s: float) -> rows.Row | None:
    """The row that a process of its own prints at last, or how that process ended; None if it took longer."""
    command = [sys.executable, "-m", MODULES[spec.system], *spec.arguments()]
    try:
        done = _python(command, limit_s)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr)
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        why = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
        said = done.stderr.strip().splitlines()
        return dict(error=f"the process ended with {why}" + (f": {said[-1]}" if said else ""))


def described_machine() -> rows.Row:
    """As a row has it. In a process of its own: CUDA, once used, keeps half a gigabyte of device memory."""
    return dict(json.loads(_python([sys.executable, "-m", "megacompile.bench.rows"], check=True).stdout))


def _python(command: list[str], limit_s: float | None = None, check: bool = False) -> subprocess.CompletedProcess[str]:
    root = str(Path(megacompile.__file__).parents[1])  # the same megacompile, wherever this one was imported from
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=limit_s,
                          check=check)
