"""Measures the optimizer's host kernels: prints a table, and a JSON line for `benchmarks/results/adam.jsonl`.

    python benchmarks/adam.py --elements 500000000 --threads 4 8 16 --output benchmarks/results/adam.jsonl

Times are medians. AdamW moves 26 bytes per parameter on bf16 weights (reads hi, remainder, gradient, m, v; writes all except
the gradient) and 28 on fp32 weights. Updating only the weights, or only the moments, moves 18. With bf16 moments it moves 18
bytes, and with 8-bit ones 14. Weights that are rounded at random have no remainder, which takes 4 bytes less. Choose a working
set well beyond the processor's caches, as in training.
"""
from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import tabulate
import torch
from torch import Tensor

from megacompile.runtime.optimizer import host_update, native
from megacompile.runtime.optimizer.rule import Part, Segment
from megacompile.runtime.optimizer.state_format import BFLOAT16, EIGHT_BITS, FLOAT32, StateFormat
from megacompile.streaming.optimizer.adamw import RULE, Options
from megacompile.system.host_memory import SharedMemory, host_memory


class Memory:
    """Makes tensors as the tiles of a streamed model have them, or with `shared` as those of several ranks.

    State: how many bytes were touched first, and the seconds that this took."""

    def __init__(self, shared: bool) -> None:
        self.shared, self.touched_bytes, self.touching_s = shared, 0, 0.0

    def tensor(self, elements: int, dtype: torch.dtype) -> Tensor:
        """A zeroed tensor [elements], in huge pages if the system has them. All pages are touched."""
        size = elements * dtype.itemsize
        memory = SharedMemory({"all": size}).piece("all") if self.shared else host_memory(size)
        start = time.perf_counter()
        memory.zero_()
        self.touching_s += time.perf_counter() - start
        self.touched_bytes += size
        return memory.view(dtype)


def machine() -> dict[str, object]:
    """What is needed to compare results: processor, cores, commit, versions."""
    processor = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    described = subprocess.run(git, capture_output=True, text=True, check=False)
    library = native.library()
    return {
        "processor": processor,
        "cores": native.default_threads(),
        "instruction_set": native.instruction_sets(library)[-1] if library else "pytorch",
        "commit": described.stdout.strip() or None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def median_s(call: Callable[[], object], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(elements: int, threads: int, repeats: int, shared: bool) -> dict[str, float]:
    """Rates with this many threads: AdamW in 1e9 parameters/s, everything else in GB/s moved."""
    memory = Memory(shared)
    weights, remainder = memory.tensor(elements, torch.bfloat16), memory.tensor(elements, torch.int16)
    gradient, other = (memory.tensor(elements, torch.bfloat16).fill_(0.01) for _ in range(2))
    state = [memory.tensor(4 * elements, torch.uint8) for _ in range(2)]
    segment = Segment(0, elements, Options(1e-4, 0.9, 0.95, 1e-8, 0.1), step=10)

    def update(part: Part, form: StateFormat = FLOAT32, rounded: bool = False) -> Callable[[], object]:
        for moment in state:
            moment.zero_()
        values = tuple(moment[:elements * form.value_bytes].view(form.dtype) for moment in state)
        scales = tuple(moment[2 * elements:][:4 * form.scales(elements)].view(torch.float32) for moment in state)
        moments = host_update.Moments(form, values, scales if form.scaled else ())
        masters = None if rounded else remainder
        return lambda: host_update.update(RULE, weights, masters, gradient, [(segment, moments)], 0.5, threads, part=part)

    calls: dict[str, tuple[Callable[[], Callable[[], object]], float]] = {
        "adamw_bf16": (lambda: update(Part.WHOLE), 1),
        "adamw_bf16_weights": (lambda: update(Part.WEIGHTS), 1),
        "adamw_bf16_moments": (lambda: update(Part.MOMENTS), 1),
        "norm_bf16": (lambda: lambda: host_update.norm(gradient, threads), 2),
        "accumulate_bf16": (lambda: lambda: host_update.accumulate(gradient, other, False, threads), 6),
        "copy_bf16": (lambda: lambda: host_update.copy(gradient, other, threads), 4),
        "adamw_bf16_moments_in_bf16": (lambda: update(Part.WHOLE, BFLOAT16), 1),
        "adamw_bf16_moments_in_8_bits": (lambda: update(Part.WHOLE, EIGHT_BITS), 1),
        "adamw_bf16_rounded": (lambda: update(Part.WHOLE, rounded=True), 1),
        "adamw_bf16_rounded_moments_in_bf16": (lambda: update(Part.WHOLE, BFLOAT16, rounded=True), 1),
        "adamw_bf16_rounded_moments_in_8_bits": (lambda: update(Part.WHOLE, EIGHT_BITS, rounded=True), 1),
    }
    rates = {name: weight * elements / median_s(call(), repeats) / 1e9 for name, (call, weight) in calls.items()}
    rates["adamw_bf16_bytes"] = 26 * rates["adamw_bf16"]
    rates["first_touch"] = memory.touched_bytes / memory.touching_s / 1e9
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=100_000_000,
                        help="number of parameters, 16 bytes each (default: 100,000,000)")
    parser.add_argument("--threads", type=int, nargs="+", default=[native.default_threads()],
                        help="numbers of threads to measure (default: all that AdamW uses)")
    parser.add_argument("--repeats", type=int, default=5, help="measurements for each median (default: 5)")
    parser.add_argument("--shared", action="store_true", help="memory that several processes map, as with several GPUs")
    parser.add_argument("--output", type=Path, help="append the JSON line to this file")
    arguments = parser.parse_args()

    rates = {threads: measure(arguments.elements, threads, arguments.repeats, arguments.shared)
             for threads in arguments.threads}
    rows = [[threads, *values.values()] for threads, values in rates.items()]
    headers = ["threads", "AdamW G param/s", "weights alone", "moments alone",
               "norm GB/s", "accumulate GB/s", "copy GB/s", "bf16 moments", "8-bit moments",
               "rounded", "rounded, bf16 moments", "rounded, 8-bit moments", "AdamW GB/s", "first touch GB/s"]
    print(tabulate.tabulate(rows, headers, floatfmt=".2f"))
    line = json.dumps({"benchmark": "adam", "elements": arguments.elements, "shared": arguments.shared, "machine": machine(),
                       "rates": rates})
    print(line)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        with arguments.output.open("a") as results:
            results.write(line + "\n")


if __name__ == "__main__":
    main()
