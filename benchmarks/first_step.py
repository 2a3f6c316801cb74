"""Measures where the time of a first step goes: from `from_config` until the step's loss and update are there.

    python benchmarks/first_step.py --shape qwen2-7b --batch 64 --output benchmarks/results/first-step.jsonl

Prints a JSON line and a table: seconds of the main thread by what it does, sampled a hundred times a second. The first rule
that fits a frame, from the innermost frame outwards, names a sample. A step ends when its loss is known; `update` is what the
host still updates then. `--cache FOLDER` puts all compiled code there: run it twice with a new folder for a cold and a warm
start. `--frames N` also lists the N functions that took longest.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

BEGAN = time.perf_counter()
#: What a sample is called, and parts of the names of files or "file:function" of which one must be in a frame's name.
RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("building the host's kernels", ("optimizer/native.py",)),
    ("measuring variants of kernels", ("triton/runtime/autotuner", "coordinate_descent", "do_bench", "benchmark_all_configs",
                                       "compat/fla.py:_bench", "compat/fla.py:_milliseconds")),
    ("waiting for Triton's compiler", ("async_compile.py", "triton/compiler", "runtime/jit.py", "compile_worker")),
    ("loading compiled code", ("codecache.py", "triton_heuristics.py")),
    ("inductor", ("torch/_inductor",)),
    ("tracing: Dynamo", ("torch/_dynamo",)),
    ("differentiating: AOT", ("torch/_functorch", "frontend/templates/joint.py", "templates/graph_cache.py")),
    ("specializing templates", ("templates/variants.py:_specialise",)),
    ("planning", ("megacompile/planning/", "megacompile/predict/")),
    ("building programs", ("passes/schedule", "passes/template", "megacompile/ir/", "megacompile/verify/")),
    ("moving into tiles, pinning", ("megacompile/weights/", "streaming/memory/", "runtime/store", "host_memory")),
    ("running the program", ("/runtime/",)),
    ("importing", ("importlib",)),
)


def name_of(frame: FrameType | None) -> str:
    while frame is not None:
        where = f"{frame.f_code.co_filename}:{frame.f_code.co_name}"
        for name, parts in RULES:
            if any(part in where for part in parts):
                return name
        frame = frame.f_back
    return "other"


def short(frame: FrameType) -> str:
    """The innermost frames of a sample, without lines."""
    found: list[str] = []
    while frame is not None and len(found) < 5:
        found.append(f"{'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found)


class Sampler:
    """State: seconds by phase and name, and by the innermost frames."""

    def __init__(self, interval: float = 0.01) -> None:
        self.by_name: Counter[tuple[str, str]] = Counter()
        self.by_frames: Counter[tuple[str, str]] = Counter()
        self.phase = "import"
        self._interval, self._main = interval, threading.main_thread().ident
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        before = time.perf_counter()
        while True:
            time.sleep(self._interval)
            frame, now = sys._current_frames().get(self._main or 0), time.perf_counter()
            if frame is not None:
                self.by_name[self.phase, name_of(frame)] += now - before  # type: ignore[assignment]
                self.by_frames[self.phase, short(frame)] += now - before  # type: ignore[assignment]
            before = now


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="qwen2-7b", help="one of benchmarks/shapes.py")
    parser.add_argument("--layers", type=int, help="number of layers (default: the shape's)")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cache", type=Path, help="folder for all caches of compiled code")
    parser.add_argument("--frames", type=int, default=0)
    parser.add_argument("--output", type=Path, help="append the row to this JSON-lines file")
    return parser


def main() -> None:
    given = options().parse_args()
    if given.cache is not None:
        cold = not given.cache.exists()
        os.environ["XDG_CACHE_HOME"] = str(given.cache)
        os.environ["TRITON_CACHE_DIR"] = str(given.cache / "triton")
    sampler = Sampler()
    import torch
    from rows import append, commit, machine
    from shapes import config
    from tabulate import tabulate

    import megacompile

    ends = {"import": time.perf_counter()}
    sampler.phase = "stream"
    torch.manual_seed(0)
    model = megacompile.from_config(config(given.shape, given.layers), dtype=torch.bfloat16, device=given.device).train()
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-5, max_grad_norm=1.0)
    ends["stream"] = time.perf_counter()
    for number in (1, 2):
        sampler.phase = f"step {number}"
        ids = torch.randint(0, model.config.vocab_size, (given.batch, given.length))
        model.megacompile.train_step(dict(input_ids=ids, labels=ids), optimizer).item()
        ends[sampler.phase] = time.perf_counter()
        sampler.phase = f"update {number}"
        model.megacompile.synchronize()
        ends[sampler.phase] = time.perf_counter()
    begins = dict(zip(ends, [BEGAN, *ends.values()], strict=False))
    seconds = {phase: round(end - begins[phase], 2) for phase, end in ends.items()}
    inductor = model.megacompile.streamed.binder.inductor
    row = {"kind": "first step", "shape": given.shape, "layers": model.config.num_hidden_layers, "batch": given.batch,
           "length": given.length, "cold": given.cache is None or cold, "seconds": seconds,
           "main_thread": {f"{phase}: {name}": round(spent, 2) for (phase, name), spent in sampler.by_name.most_common()
                           if spent >= 0.1},
           "compiled": inductor.compiled, "from_cache": inductor.from_cache, "inductor_s": round(inductor.seconds, 2),
           **machine(given.device), "commit": commit()}
    if given.output is not None:
        append(given.output, row)
    print(json.dumps(row))
    names = list(dict.fromkeys(name for (_, name), spent in sampler.by_name.most_common() if spent >= 0.1))
    print(tabulate([[name, *(round(sampler.by_name[phase, name], 1) for phase in ends)] for name in names] +
                   [["all", *seconds.values()]], headers=["seconds", *ends], tablefmt="github"))
    for (phase, frames), spent in sampler.by_frames.most_common(given.frames):
        print(f"{spent:6.1f} s  {phase}: {frames}")


if __name__ == "__main__":
    main()
