"""Samples the device's SM clock and power during timed steps.

A GPU at its power limit lowers its clock, so rows that were measured at different clocks cannot be compared directly.
"""
from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
from collections.abc import Iterator

import torch

#: Column of nvidia-smi -> field of a row.
QUERY = {"clocks.sm": "sm_clock_mhz", "power.draw": "power_w"}
INTERVAL_MS = 200


def _command(index: str) -> list[str]:
    return ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits", "-lms", str(INTERVAL_MS),
            "-i", index]


@contextlib.contextmanager
def sampled(device: str) -> Iterator[dict[str, float]]:
    """A context that yields a dict and fills it at the end with medians over its duration. The dict stays empty on a CPU,
    without nvidia-smi, and if nvidia-smi reports nothing."""
    found: dict[str, float] = {}
    if torch.device(device).type != "cuda" or shutil.which("nvidia-smi") is None:
        yield found
        return
    # Uses the UUID, since nvidia-smi's indices include devices that CUDA_VISIBLE_DEVICES hides.
    index = "GPU-" + str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
    process = subprocess.Popen(_command(index), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield found
    finally:
        process.terminate()
        printed, _ = process.communicate()
        found.update(medians(printed))


def medians(printed: str) -> dict[str, float]:
    """The medians of lines such as "1480, 690.31". Values that are not numbers ("[N/A]") and incomplete lines are skipped."""
    lines = [line.split(",") for line in printed.splitlines()]
    samples = {field: [float(line[i]) for line in lines if len(line) == len(QUERY) and _is_number(line[i])]
               for i, field in enumerate(QUERY.values())}
    return {field: statistics.median(values) for field, values in samples.items() if values}


def _is_number(text: str) -> bool:
    return text.strip().replace(".", "", 1).isdigit()
