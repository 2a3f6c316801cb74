"""The common part of all benchmark rows: options, batches, timing, the machine, and files of rows.

A row is a JSON line. Its `system`, its `options` (those that differ from the defaults) and its `device` identify what was
measured. A row that could not be measured has an `error`.

Under torchrun, all processes measure the same rows together, each with batches of its own. Rates are those of all of them.
Times are those of the first, which alone prints and appends rows.
"""
from __future__ import annotations

import abc
import argparse
import contextlib
import gc
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import clocks
import torch
import torch.distributed as dist
from shapes import SHAPES, active_parameters, attention_flops, layers_that_fit
from torch import Tensor

from megacompile.errors import MegacompileError, named_line
from megacompile.planning.device import process_count, rank_in_job
from megacompile.predict.hardware import device_name
from megacompile.streaming.optimizer.names import optimizer_named
from megacompile.system.files import read_regular
from megacompile.training import parameter_count


class KeptModel(abc.ABC):
    """Rows with the same `COMMON` options use one model.

    State: the `model` of the last row, the options that it was `made` for, and the number of rows that `used` it."""

    COMMON: tuple[str, ...]

    def __init__(self) -> None:
        self.model: Any = None
        self.made: tuple[Any, ...] = ()
        self.used = 0

    @abc.abstractmethod
    def planned(self, given: argparse.Namespace) -> dict[str, Any]:
        """The options of a row that `replan` can change."""

    @abc.abstractmethod
    def streamed(self, given: argparse.Namespace, planned: dict[str, Any]) -> Any:
        """A new model, streamed with the options of a row."""

    def of(self, given: argparse.Namespace) -> Any:
        """The streamed model, with the plan of a row."""
        made = tuple(tuple(value) if isinstance(value := getattr(given, name), list) else value for name in self.COMMON)
        if self.model is not None and made == self.made:
            self.used += 1
            self.model.megacompile.replan(**self.planned(given))
            return self.model
        self.close()
        self.made, self.used = made, 1
        self.model = self.streamed(given, self.planned(given))
        return self.model

    @contextlib.contextmanager
    def closed_if_failed(self) -> Iterator[None]:
        """A context for the measurement of a row. If it fails, no other row uses the model."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the model, if there is one."""
        model, self.model = self.model, None
        if model is not None:
            model.megacompile.close()
        del model
        gc.collect()  # otherwise its tiles may still be there while the next model is made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Row = dict[str, Any]
Measure = Callable[[argparse.Namespace], Row]

#: Options that say how to measure or where to write the row, and so do not identify it.
NOT_IDENTITY = ("append", "cache", "commit", "device", "folder", "log_file", "profile", "recorded", "recorded_steps", "steps",
                "timeline", "warm_up")


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all rows have."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--shape", choices=SHAPES, default="qwen2-7b", help="shape of the model (default: qwen2-7b)")
    found.add_argument("--layers", type=_layers,
                       help="number of layers; fit: as many as the host's memory can train (default: the shape's)")
    found.add_argument("--batch", type=int, default=64, help="sequences per step (default: %(default)s)")
    found.add_argument("--length", type=int, default=1024, help="tokens per sequence (default: %(default)s)")
    found.add_argument("--steps", type=int, default=4, help="number of timed steps, after --warm-up (default: %(default)s)")
    found.add_argument("--warm-up", type=int, default=3,
                       help="number of untimed steps; the second touches the pages of deferred moments (default: %(default)s)")
    found.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                       help="cpu or cuda (default: cuda if there is a GPU)")
    found.add_argument("--micro-batch-size", type=int,
                       help="sequences that the device computes at a time (default: chosen by the planner; native: the batch)")
    found.add_argument("--max-grad-norm", type=float, default=1.0, help="clip gradients to this global norm (default: 1.0)")
    found.add_argument("--no-clipping", action="store_true", help="do not clip gradients")
    found.add_argument("--append", type=Path, help="append the row to this file")
    found.add_argument("--commit", help="commit to record in the row (default: the one that git reports)")
    return found


def clip(given: argparse.Namespace) -> float | None:
    """The norm to which gradients are clipped; None if they are not, as with updates on arrival."""
    return None if given.no_clipping or getattr(given, "overlap", False) else float(given.max_grad_norm)


def _layers(text: str) -> int | str:
    return text if text == "fit" else int(text)


def layer_count(given: argparse.Namespace) -> int:
    """The number of layers that was asked for. "fit": as many as fit with the row's optimizer."""
    if given.layers == "fit":
        if getattr(given, "optim", None) is None:
            return layers_that_fit(given.shape)
        named = optimizer_named(given.optim)
        choice = named.choice(given.optim_args, given.overlap)
        return layers_that_fit(given.shape, None, choice, replace(choice, moments=len(named.kind.rule.moments)))
    return int(given.layers or SHAPES[given.shape]["num_hidden_layers"])


# ---------------------------------------------------------------- measuring

def timed(step: Callable[[Tensor], float], given: argparse.Namespace, before: Callable[[], None] = lambda: None,
          seed: int = 0, beside: Callable[[Tensor], float] | None = None) -> Row:
    """Times `step(ids)`, which returns the loss when the step is done. Each call gets a new random batch, int64 [batch,
    length], which depends only on the seed and the rank. `before` is called between warm-up and timing.

    `beside` is called after each step with the same batch. The row then also has `beside_s` and `beside_times_s`. Both calls
    see the same changes of the host's speed."""
    vocabulary = SHAPES[given.shape]["vocab_size"]
    generator = torch.Generator().manual_seed(seed + 10**6 * (rank_in_job() // sequence_ranks(given)))
    times: list[float] = []
    beside_times: list[float] = []
    losses: list[float] = []

    def clocked(call: Callable[[Tensor], float], ids: Tensor, seconds: list[float]) -> float:
        start = time.perf_counter()
        loss = call(ids)
        seconds.append(time.perf_counter() - start)
        return loss

    def run(count: int) -> None:
        for _ in range(count):
            ids = torch.randint(0, vocabulary, (given.batch, given.length), generator=generator)
            losses.append(clocked(step, ids, times))
            _progress(f"step {len(times)} of {given.warm_up + given.steps}: {times[-1]:.3g} s, loss {losses[-1]:.4g}")
            if beside is not None:
                clocked(beside, ids, beside_times)

    run(given.warm_up)
    before()
    with clocks.sampled(given.device) as sampled:
        run(given.steps)

    def median(seconds: list[float]) -> float:
        return round(statistics.median(seconds[given.warm_up:]), 4)

    found = dict(step_s=median(times), times_s=[round(t, 4) for t in times], losses=losses, **sampled)
    if beside is not None:
        found |= dict(beside_s=median(beside_times), beside_times_s=[round(t, 4) for t in beside_times])
    return found


def _progress(line: str) -> None:
    """Tells whoever waits for a row, on stderr. Rows go to stdout."""
    if rank_in_job() == 0:
        print(line, file=sys.stderr, flush=True)


def anywhere(here: bool) -> bool:
    """Whether a flag is set in any process of the job. All of them must ask, after the model is streamed."""
    flag = torch.tensor([here], dtype=torch.int32)
    if process_count() > 1:
        dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def sequence_ranks(given: argparse.Namespace) -> int:
    """The number of processes that have each sequence together, and get the same batches."""
    return getattr(given, "sequence_ranks", 1)


def rates(model: Any, given: argparse.Namespace, step_s: float) -> Row:
    """Parameters and rates. `tflops` counts 6 FLOPs per active parameter and token (only the experts that a token is routed
    to), without recomputation, and fewer for frozen ones, as a plan does; `tflops_with_attention` adds causal attention."""
    active = active_parameters(model)
    frozen = not all(p.requires_grad for p in model.parameters())
    products = model.megacompile.streamed.tiling.operations() if frozen else 6 * active
    tokens = given.batch * given.length * process_count() // sequence_ranks(given)
    return dict(parameters=parameter_count(model), active_parameters=active,
                tflops=significant(products * tokens / step_s / 1e12),
                tflops_with_attention=significant(
                    (products + attention_flops(model, given.length)) * tokens / step_s / 1e12))


def significant(value: float) -> float:
    return round(value, 1) if value >= 10 else float(f"{value:.3g}")


def finished(row: Row) -> Row:
    """The row, with an `error` if a loss is not finite: such a run did not train properly. A long run's `curve` has all of
    them."""
    losses = row["curve"] if "curve" in row else row["losses"]
    wrong = [number for number, loss in enumerate(losses) if not math.isfinite(loss)]
    return row | dict(error=f"the loss of step {wrong[0] + 1} is {losses[wrong[0]]}") if wrong else row


#: Separates the options of rows on a command line.
THEN = "--then"


def main(system: str, options: argparse.ArgumentParser, measure: Measure) -> None:
    """Measures the rows of a command line, prints each, and appends it to a file if --append is given. A row that failed is
    only printed, and the exit code is then 1."""
    given = [options.parse_args(arguments) for arguments in command_lines(sys.argv[1:])]
    failed = ["error" in one(system, options, each, measure) for each in given]
    if any(failed):
        sys.exit(1)


def command_lines(arguments: list[str]) -> list[list[str]]:
    """The arguments of each row, split at `THEN`."""
    found: list[list[str]] = [[]]
    for argument in arguments:
        if argument == THEN:
            found.append([])
        else:
            found[-1].append(argument)
    return found


def one(system: str, options: argparse.ArgumentParser, given: argparse.Namespace, measure: Measure) -> Row:
    """Measures a row, prints it, and appends it to the file given by --append unless it failed."""
    several = {"gpus": process_count()} if process_count() > 1 else {}
    head = dict(system=system, options=identifying(options, given) | several, shape=given.shape, batch=given.batch,
                length=given.length)
    try:
        row = finished(measure(given))
    except Exception as error:  # any error is the result of the row
        traceback.print_exc()
        row = dict(error=named_line(error))
    row = head | row | machine(given.device) | dict(commit=given.commit or commit(), date=time.strftime("%Y-%m-%d"))
    if rank_in_job() > 0:
        return row
    print(json.dumps(row), flush=True)
    if given.append and "error" not in row:
        append(given.append, row)
    return row


# ---------------------------------------------------------------- identity and machine

def identifying(options: argparse.ArgumentParser, given: argparse.Namespace) -> Row:
    return {name: value for name, value in vars(given).items()
            if name not in NOT_IDENTITY and value != options.get_default(name)}


def identity(system: str, options: Mapping[str, Any], device: str) -> str:
    """A string that is equal for rows that measure the same thing."""
    return json.dumps([system, dict(options), device], sort_keys=True)


def machine(device: str) -> Row:
    return dict(device=device_name(device)[1], cores=len(os.sched_getaffinity(0)), torch=torch.__version__,
                python=platform.python_version())


def commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    except FileNotFoundError:  # no git
        return "unknown"


# ---------------------------------------------------------------- files

def append(path: Path, row: Row) -> None:
    """Appends a row in a single write, so that lines stay complete if the process is stopped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        file.write((json.dumps(row) + "\n").encode())


def read(path: Path) -> list[Row]:
    """Reads the rows of a file; a missing file has none. Raises `MegacompileError` for a line that is not a row."""
    if not path.exists():
        return []
    try:
        lines = read_regular(path).splitlines()
    except OSError as error:
        raise MegacompileError(f"{path} cannot be read ({error.strerror}): give a file of rows, or a new one") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = dict(json.loads(line))
        except (RecursionError, TypeError, ValueError) as error:
            raise MegacompileError(f"line {number} of {path} is not a row ({error}): remove it") from error
        if "device" not in row:
            raise MegacompileError(f"line {number} of {path} is not a row (it names no device): give a file of rows, or a "
                                   "new one")
        rows.append(row)
    return rows


def measured_before(path: Path | None, wanted: Row) -> Row | None:
    """The first row of a file that has these fields; None if there is none, or no file."""
    return None if path is None else next((row for row in read(path) if wanted.items() <= row.items()), None)


def latest(rows: Iterable[Row]) -> dict[str, Row]:
    """The last row of each identity. Rows without options are left out."""
    return {identity(row["system"], row["options"], row["device"]): row for row in rows if "options" in row}


def by_commit(rows: Iterable[Row]) -> dict[tuple[str, str | None], Row]:
    """The last row of each identity and commit."""
    return {(identity(row["system"], row["options"], row["device"]), row.get("commit")): row
            for row in rows if "options" in row}


if __name__ == "__main__":  # run in a separate process, whose device memory is freed when it ends
    print(json.dumps(machine("cuda" if torch.cuda.is_available() else "cpu")))
