"""Checks that nothing grows or slows down over many steps: host and device memory, threads, open files, step times.

    python benchmarks/endurance.py --shape tiny --layers 2 --batch 4 --length 32 --steps 1000 --uncompiled
    python benchmarks/endurance.py --shape qwen2-7b --batch 16 --length 1024 --device-memory 24GiB --minutes 8 --train-step
    torchrun --standalone --nproc-per-node 2 benchmarks/endurance.py --batch 16 --minutes 20 --train-step --text book.txt

The first third of the samples is warm-up, in which caches fill and allocators reach their size. In the rest, the median of the
second half is compared with that of the first half. The row is an error if memory grows by more than 1%, if there are more
threads or open files, or if steps are more than 1% slower (on a shared CPU, whose clock varies more, set `--step-tolerance`).
As in a real run, every 10th step is followed by an evaluation, and every 25th step has another length.

Rows are random tokens, or pieces of a text whose bytes are the tokens (`--text`). Several processes have a part of each batch:
one process with `--batch 32` learns from the rows of two with `--batch 16`. `curve` is the loss of each step; two curves can be
compared if `text_sha256` is the same. The row has the measurements of the first process, and is an error if anything grows in
any of them.

The row is printed at the end. `--log-file FILE` appends each sample to a file as soon as it is taken, with the losses since the
sample before it: a run that is cut short leaves what it has measured.
"""
from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import rows
import torch
from shapes import random_model
from step import gib
from torch import Tensor

import megacompile
from megacompile.corpus import ByteTokenizer, read_text
from megacompile.errors import MegacompileError
from megacompile.planning.device import process_count, rank_in_job
from megacompile.system.host_memory import resident_bytes

_EVALUATION, _OTHER_LENGTH = 10, 25
_WARM_UP = 1 / 3


@dataclass(frozen=True)
class Sample:
    """Measurements after a step. `step_s`: median duration of the steps since the previous sample."""

    host_bytes: int
    device_bytes: int
    threads: int
    files: int
    step_s: float

    @classmethod
    def now(cls, device: str, times: list[float]) -> Sample:
        reserved = torch.cuda.memory_reserved() if device == "cuda" else 0
        return cls(resident_bytes(), reserved, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")),
                   statistics.median(times))


def options() -> argparse.ArgumentParser:
    parser = rows.parser(__doc__)
    parser.add_argument("--minutes", type=float, help="duration in minutes, instead of --steps")
    parser.add_argument("--samples", type=int, default=30, help="minimum number of samples (default: 30)")
    parser.add_argument("--log-file", type=Path, help="append each sample to this file when it is taken")
    parser.add_argument("--train-step", action="store_true", help="run each step as one program")
    parser.add_argument("--text", help="file whose bytes are the tokens (default: random tokens)")
    parser.add_argument("--overlap", action="store_true", help="update tiles as their gradients arrive, without clipping")
    parser.add_argument("--device-memory", help='device memory budget, such as "24GiB" (default: the free memory)')
    parser.add_argument("--uncompiled", action="store_true", help="run templates op by op instead of compiling them")
    parser.add_argument("--tolerance", type=float, default=0.01, help="allowed growth of memory, as a fraction (default: 0.01)")
    parser.add_argument("--step-tolerance", type=float,
                        help="allowed growth of step times, as a fraction (default: --tolerance)")
    return parser


def growth(before: float, after: float) -> float:
    return after / before - 1 if before else float(after > 0)


def drift(samples: list[Sample]) -> dict[str, float]:
    """For each quantity, the growth from the median of the first half to that of the second half, as a fraction. The warm-up is
    left out. Raises `MegacompileError` for too few samples."""
    kept = samples[int(len(samples) * _WARM_UP):]
    if len(kept) < 2:
        raise MegacompileError(f"drift takes at least two samples after warm-up, and the run has {len(samples)} in all: give "
                               "more --steps or --minutes")
    halves = kept[:len(kept) // 2], kept[len(kept) // 2:]
    return {name: growth(*(statistics.median(getattr(sample, name) for sample in half) for half in halves))
            for name in Sample.__dataclass_fields__}


def grown(found: dict[str, float], tolerance: float, step_tolerance: float) -> str | None:
    """A message about what has grown too much, or None. Threads and files must not grow at all."""
    allowed = dict(host_bytes=tolerance, device_bytes=tolerance, threads=0.0, files=0.0, step_s=step_tolerance)
    over = [f"{name} by {found[name]:.2%}" for name, most in allowed.items() if found[name] > most]
    return f"grown: {', '.join(over)}" if over else None


class Batches:
    """Draws the rows of all processes, and returns those of this one. State: the generator, which all processes advance
    alike. `text_sha256`: the digest of the text's file, or None."""

    def __init__(self, given: argparse.Namespace, vocabulary: int) -> None:
        self.batch, self.vocabulary = given.batch, vocabulary
        self.text_sha256 = None if given.text is None else hashlib.sha256(Path(given.text).read_bytes()).hexdigest()
        self.text = None if given.text is None else read_text([Path(given.text)], ByteTokenizer()).long()
        self.generator = torch.Generator().manual_seed(0)

    def next(self, length: int) -> Tensor:
        """int64 [batch, length]. Raises `MegacompileError` if the text is shorter than a row."""
        count = self.batch * process_count()
        own = slice(rank_in_job() * self.batch, (rank_in_job() + 1) * self.batch)
        if self.text is None:
            return torch.randint(0, self.vocabulary, (count, length), generator=self.generator)[own]
        if len(self.text) <= length:
            raise MegacompileError(f"the text has {len(self.text)} bytes, and a row has {length}: give more text")
        starts = torch.randint(0, len(self.text) - length, (count,), generator=self.generator)
        return torch.stack([self.text[start:start + length] for start in starts[own].tolist()])


def measure(given: argparse.Namespace) -> rows.Row:
    model = megacompile.stream(random_model(given.shape, rows.layer_count(given), given.device), device=given.device,
                               micro_batch_size=given.micro_batch_size, device_memory=given.device_memory,
                               compile=False if given.uncompiled else None)
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-5, overlap="backward" if given.overlap else None,
                                  max_grad_norm=rows.clip(given))
    batches = Batches(given, model.config.vocab_size)
    samples: list[Sample] = []
    losses: list[float] = []
    times: list[float] = []
    begin = time.monotonic()
    done = logged = 0
    while not (rows.anywhere(time.monotonic() - begin > 60 * given.minutes) if given.minutes else done >= given.steps):
        done += 1
        length = given.length // 2 if done % _OTHER_LENGTH == 0 else given.length
        ids = batches.next(length)
        start = time.perf_counter()
        losses.append(step(model, optimizer, ids, given.train_step))
        if length == given.length:
            times.append(time.perf_counter() - start)
        if done % _EVALUATION == 0:
            with torch.no_grad():
                model(input_ids=ids, labels=ids)
        if len(times) >= max(1, given.steps // given.samples if not given.minutes else 1):
            samples.append(Sample.now(given.device, times))
            times.clear()
            if given.log_file is not None and rank_in_job() == 0:
                rows.append(given.log_file, dict(steps=done, losses=losses[logged:], **asdict(samples[-1])))
            logged = done
    visiting = list(model.megacompile.plan.visiting_state)
    model.megacompile.close()
    found = drift(samples)
    error = grown(found, given.tolerance, given.tolerance if given.step_tolerance is None else given.step_tolerance)
    if error and rank_in_job() > 0:
        print(f"rank {rank_in_job()}: {error}", flush=True)
    if rows.anywhere(bool(error)):
        error = error or "another rank reports what has grown"
    last = samples[-1]
    return dict(
        steps=done, minutes=round((time.monotonic() - begin) / 60, 2), samples=len(samples),
        drift={name: round(value, 5) for name, value in found.items()}, host_gib=gib(last.host_bytes),
        device_gib=gib(last.device_bytes), visiting_state=visiting, threads=last.threads, files=last.files,
        step_s=round(last.step_s, 5), text_sha256=batches.text_sha256,
        losses=[losses[0], losses[-1]], curve=[round(loss, 4) for loss in losses], **({"error": error} if error else {}))


def step(model: Any, optimizer: megacompile.AdamW, ids: torch.Tensor, whole: bool) -> float:
    if whole:
        return float(model.megacompile.train_step(dict(input_ids=ids, labels=ids), optimizer))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def main() -> None:
    rows.main("endurance", options(), measure)


if __name__ == "__main__":
    main()
