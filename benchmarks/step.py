"""One row: the training step of a decoder shape with random weights, timed over steady steps, a fresh batch each.

    python benchmarks/step.py --shape qwen2-7b --layers 28 --batch 64 --length 1024 --checkpoint-interval 1

Prints one JSON line: machine, versions, commit, every step's time, TFLOPS (6 x parameters x tokens / step time, recompute
not counted), device peak, host bytes, and the loss. `--append FILE` adds the line to a file.
"""
from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from shapes import SHAPES, random_model

import megacompile
from megacompile.runtime.operations import OPERATIONS


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2-7b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=4, help="timed steps, after --warm-up")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checkpoint-interval", type=int, default=1)
    parser.add_argument("--micro-batch-size", type=int)
    parser.add_argument("--weight-slots", type=int)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--resident", nargs="*", default=[])
    parser.add_argument("--saved-layers", type=int, help="default: as many as fit")
    parser.add_argument("--device-memory")
    parser.add_argument("--train-step", action="store_true", help="each step as one program")
    parser.add_argument("--waves", type=int)
    parser.add_argument("--no-clipping", action="store_true")
    parser.add_argument("--overlap", action="store_true", help="with --train-step: update as gradients arrive, unclipped")
    parser.add_argument("--compute-only", action="store_true", help="no copies and no optimizer: the templates' own rate")
    parser.add_argument("--profile", action="store_true", help="also print where one more step's device time goes")
    parser.add_argument("--append", type=Path)
    parser.add_argument("--commit", help="recorded; default: git's")
    return parser.parse_args()


def machine(device: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return dict(device=name, cores=len(os.sched_getaffinity(0)), torch=torch.__version__, python=platform.python_version())


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def resident_bytes() -> int:
    """Resident set of this process, in bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    given = arguments()
    started = time.perf_counter()
    model = random_model(given.shape, given.layers, given.device)
    parameters = sum(p.numel() for p in model.parameters())
    if given.device == "cuda":
        torch.cuda.empty_cache()
    before = resident_bytes()
    model = megacompile.stream(
        model, device=given.device, checkpoint_interval=given.checkpoint_interval, micro_batch_size=given.micro_batch_size,
        weight_slots=given.weight_slots, resident=tuple(given.resident), saved_layers=given.saved_layers,
        device_memory=given.device_memory, waves=given.waves)
    clip = None if given.no_clipping or given.overlap else given.max_grad_norm
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-5, max_grad_norm=clip,
                                  overlap="backward" if given.overlap else None)
    if given.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    generator = torch.Generator().manual_seed(0)
    times, losses, phases = [], [], []
    setup_s = time.perf_counter() - started
    for step in range(given.warm_up + given.steps):
        if given.compute_only and step == given.warm_up:
            leave_out_everything_but_compute()
        ids = torch.randint(0, model.config.vocab_size, (given.batch, given.length), generator=generator)
        start = time.perf_counter()
        if given.train_step:
            loss = model.megacompile.train_step(dict(input_ids=ids, labels=ids), optimizer)
            loss.item()
            issued = after = time.perf_counter()
        else:
            loss = model(input_ids=ids, labels=ids).loss
            issued = time.perf_counter()
            loss.backward()
            after = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
        times.append(time.perf_counter() - start)
        phases.append((issued - start, after - issued, times[-1] - (after - start)))
        losses.append(loss.item())
    if given.profile:
        profile(model, optimizer, ids)
    steady = times[given.warm_up:]
    median = statistics.median(steady)
    model.megacompile.synchronize()
    stats = model.megacompile.stats
    plan = model.megacompile.plan
    row = dict(
        shape=given.shape, layers=model.config.num_hidden_layers, batch=given.batch, length=given.length,
        checkpoint_interval=plan.checkpoint_interval, micro_batch=plan.micro_batches[0], weight_slots=plan.weight_slots,
        resident=list(plan.resident), saved_layers=plan.saved_layers, compute_only=given.compute_only,
        device_memory=given.device_memory, predicted_device_gib=round(stats["predicted_device_bytes"] / 2**30, 2),
        max_grad_norm=clip, train_step=given.train_step, waves=plan.waves, overlap=given.overlap, parameters=parameters,
        tflops=round(6 * parameters * given.batch * given.length / median / 1e12, 1), step_s=round(median, 4),
        times_s=[round(t, 4) for t in times], phases_s=[[round(p, 3) for p in phase] for phase in phases], losses=losses,
        grad_norm=optimizer.grad_norm, peak_device_gib=round(stats["peak_device_bytes"] / 2**30, 2),
        host_gib=round(stats["host_bytes"] / 2**30, 2), host_bytes_per_parameter=round(stats["host_bytes"] / parameters, 3),
        resident_set_gib=round(resident_bytes() / 2**30, 2), resident_set_before_gib=round(before / 2**30, 2),
        checkpoint_gib=round(checkpoint_bytes(model, plan) / 2**30, 2), setup_s=round(setup_s, 1),
        **machine(given.device), commit=given.commit or commit(), date=time.strftime("%Y-%m-%d"))
    line = json.dumps(row)
    print(line)
    if given.append:
        with given.append.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    model.megacompile.close()


def leave_out_everything_but_compute() -> None:
    """Copies that move nothing and updates that change nothing: what remains is the rate of the templates. Slots keep the
    weights that the warm-up left there: kernels are faster on zeros."""
    for op, instead in (
            ("prefetch", lambda frame, node: frame.arena.weights(node.kwargs["into"], frame.store[node.kwargs["tile"]].layout)),
            ("offload", lambda frame, node: None), ("adam", lambda frame, node: None)):
        OPERATIONS[op] = instead


def profile(model: Any, optimizer: Any, ids: torch.Tensor) -> None:
    """One step under PyTorch's profiler: device time by kernel."""
    from torch.profiler import ProfilerActivity
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as recorded:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.megacompile.synchronize()
    print(recorded.key_averages().table(sort_by="device_time_total", row_limit=40, max_name_column_width=70))


def checkpoint_bytes(model: Any, plan: Any) -> int:
    """Activation checkpoints of one step: the inputs of all blocks."""
    blocks = -(-(model.config.num_hidden_layers - plan.saved_layers) // plan.checkpoint_interval)
    return blocks * plan.batch * plan.length * model.config.hidden_size * model.dtype.itemsize


if __name__ == "__main__":
    main()
