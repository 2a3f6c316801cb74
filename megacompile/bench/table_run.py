"""Measures the rows of a table that a file does not have yet.

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
from typing import IO, Any

import megacompile
from megacompile.bench import rows
from megacompile.bench.tables import MODULES, Spec, Table

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
    done = subprocess.run([sys.executable, "-m", "megacompile.bench.rows"], env=_environment(), capture_output=True, text=True,
                          check=True)
    return dict(json.loads(done.stdout))


def _environment() -> dict[str, str]:
    root = str(Path(megacompile.__file__).parents[1])  # so that the process imports this copy of megacompile
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
