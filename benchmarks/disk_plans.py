"""Simulates steps of Llama's 70B shape on one H200 with moments on fast drives, against the same with all state in memory.

    python benchmarks/disk_plans.py --output benchmarks/results/disk-plans.jsonl

Needs no GPU, no drive and no weights. A row is one plan: kind of moments, rates of the drives, host memory.
"""
from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import tabulate
import torch
from rows import append, commit, machine
from shapes import SHAPES, config
from transformers import AutoModelForCausalLM

import megacompile
from megacompile.predict.hardware import Hardware
from megacompile.scheduling import Schedule

#: Kind of moments -> (optimizer, when tiles are updated).
MOMENTS = {"float32": ("adamw", "step"), "float32, on arrival": ("adamw", "arrival"), "bfloat16": ("adamw_bf16", "step"),
           "8-bit": ("adamw_8bit", "step")}
#: GB/s that drives read and write: four of PCIe 4, eight of PCIe 5.
DRIVES = ((27, 11), (48, 26))


def scheduled(given: argparse.Namespace, moments: str, **options: Any) -> Schedule:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(given.shape, given.layers), dtype=torch.bfloat16)
    optim, update = MOMENTS[moments]
    return megacompile.schedule(model, batch=given.batch, length=given.length, whole_step=True, optim=optim, update=update,
                                **{"hardware": "h200", **options})


def measure(given: argparse.Namespace, moments: str, drives: tuple[int, int], host_memory: str,
            in_memory_s: float) -> dict[str, Any]:
    """The row of a plan with a disk, beside the seconds of a step with all in memory."""
    read, write = drives
    hardware = replace(Hardware.find("h200"), disk={"read": read * 1e9, "write": write * 1e9})
    found = scheduled(given, moments, hardware=hardware, host_memory=host_memory, disk="/nvme/state")
    plan, step = found.plan, found.simulate()
    written = sum(found.tiling.layouts[tile].disk_bytes for tile in plan.disk_state) / 1e9
    return {
        "benchmark": "disk_plans", "shape": given.shape, "layers": given.layers or SHAPES[given.shape]["num_hidden_layers"],
        "batch": given.batch, "length": given.length, "hardware": "h200", "host_memory": host_memory, "moments": moments,
        "drives_gb_s": {"read": read, "write": write}, "step_s": round(step.step_s, 3), "in_memory_s": round(in_memory_s, 3),
        "ratio": round(in_memory_s / step.step_s, 4), "tiles": len(found.tiling.layouts), "disk_tiles": len(plan.disk_state),
        "disk_gb_per_step": {"read": round(written * (1 + plan.deferred_moments), 1), "write": round(written, 1)},
        "state_slabs": plan.state_slabs, "deferred_moments": plan.deferred_moments, "binds": str(step.binds),
        "critical_s": {str(lane): round(seconds, 2) for lane, seconds in step.critical_s.items() if seconds >= 0.01},
        "commit": commit(), **machine("cpu")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-70b", help="shape of the model (default: %(default)s)")
    parser.add_argument("--layers", type=int, help="number of layers (default: the shape's)")
    parser.add_argument("--batch", type=int, default=64, help="sequences per step (default: %(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="tokens per sequence (default: %(default)s)")
    parser.add_argument("--host-memory", nargs="+", default=["512GiB", "512GB"], help="budgets (default: 512GiB 512GB)")
    parser.add_argument("--output", type=Path, help="append JSON lines to this file")
    given = parser.parse_args()
    rows = []
    for moments in MOMENTS:
        in_memory_s = scheduled(given, moments, host_memory="4TiB").simulate().step_s
        for drives in DRIVES:
            for host_memory in given.host_memory:
                row = measure(given, moments, drives, host_memory, in_memory_s)
                rows.append(row)
                if given.output:
                    append(given.output, row)
                print(json.dumps(row), flush=True)
    print(tabulate.tabulate(
        [(row["moments"], "{read} / {write}".format(**row["drives_gb_s"]), row["host_memory"], row["disk_tiles"],
          "{read} / {write}".format(**row["disk_gb_per_step"]), row["step_s"], row["in_memory_s"], row["ratio"], row["binds"])
         for row in rows],
        ("moments", "drives, GB/s", "host memory", "tiles on disk", "read and written, GB", "step, s", "in memory, s", "rate",
         "binds"), "github", disable_numparse=True))


if __name__ == "__main__":
    main()
