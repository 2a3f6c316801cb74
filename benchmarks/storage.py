"""Measures how fast a model is loaded from disk, and how much saving its training state slows training down.

    python benchmarks/storage.py --shape qwen2-7b --folder /scratch                      # loading 15 GB with a cold cache
    python benchmarks/storage.py --shape qwen2-7b --layers 8 --folder /scratch --save    # also saving, 12 bytes per parameter

Writes a model with random weights as safetensors files and removes them from the page cache. Reads the raw files with as many
threads, for the rate of the disk. Removes them from the cache again and loads them with `megacompile.from_pretrained`; the rate
of loading does not include the model's capture. With `--save`, times steps without a save, and steps during a save of
`CheckpointWriter`. The slow-down includes the time for which `save` itself blocks training.

Under torchrun, all processes load the files and save the state of one copy of the model:

    torchrun --standalone --nproc-per-node 4 benchmarks/storage.py --shape qwen2-32b --layers 12 --folder /scratch --save
"""
from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import rows
import torch
import torch.distributed as dist
from shapes import random_model
from step import gib

import megacompile
from megacompile.checkpoint.writer import CheckpointWriter
from megacompile.planning.device import join_group, process_count, rank_in_job
from megacompile.system.host_memory import resident_bytes
from megacompile.weights.filling import READERS

_CHUNK_BYTES = 16 << 20


def options() -> argparse.ArgumentParser:
    parser = rows.parser(__doc__)
    parser.add_argument("--folder", type=Path,
                        help="folder on the disk to measure (default: the folder for temporary files)")
    parser.add_argument("--save", action="store_true", help="also measure saving during training")
    parser.add_argument("--uncompiled", action="store_true", help="run templates op by op instead of compiling them")
    return parser


def measure(given: argparse.Namespace) -> rows.Row:
    with shared_folder(given) as folder:
        weights, disk_s = folder / "model", 0.0
        if rank_in_job() == 0:
            random_model(given.shape, rows.layer_count(given), given.device).save_pretrained(weights, max_shard_size="2GB")
            files = sorted(weights.glob("*.safetensors"))
            empty_cache(files)
            disk_s = seconds(lambda: read(files))
            empty_cache(files)
        wait_for_all()
        size = sum(file.stat().st_size for file in weights.glob("*.safetensors"))
        before = resident_bytes()
        begun = time.perf_counter()
        model = megacompile.from_pretrained(weights, device=given.device, micro_batch_size=given.micro_batch_size,
                                            compile=False if given.uncompiled else None).train()
        load_s = time.perf_counter() - begun
        capture_s = model.megacompile.stats["capture_s"]
        row = dict(
            layers=model.config.num_hidden_layers, parameters=sum(p.numel() for p in model.parameters()),
            files_gib=gib(size), disk_s=round(disk_s, 6), load_s=round(load_s, 2),
            capture_s=round(capture_s, 2), disk_gb_per_s=rate(size, disk_s) if disk_s else None,
            load_gb_per_s=rate(size, load_s - capture_s),
            resident_set_gib=gib(resident_bytes() - before), losses=[])
        row |= saving(model, folder / "checkpoints", given) if given.save else {}
        model.megacompile.close()
    return row


@contextlib.contextmanager
def shared_folder(given: argparse.Namespace) -> Iterator[Path]:
    """A temporary folder that all processes use. The first one makes and removes it."""
    if process_count() > 1:
        join_group(given.device)
    with contextlib.ExitStack() as owned:
        made = [owned.enter_context(tempfile.TemporaryDirectory(dir=given.folder)) if rank_in_job() == 0 else None]
        if process_count() > 1:
            dist.broadcast_object_list(made, device=torch.device("cpu"))
        yield Path(str(made[0]))
        wait_for_all()


def wait_for_all() -> None:
    rows.anywhere(False)


def seconds(action: Any) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def rate(size: int, taken_s: float) -> float:
    return round(size / taken_s / 1e9, 3)


def empty_cache(files: list[Path]) -> None:
    """Removes the files from the page cache, so that the next read comes from the disk."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def read(files: list[Path]) -> None:
    """Reads all bytes of the files and discards them."""
    def chunks(file: Path, start: int) -> None:
        buffer = bytearray(_CHUNK_BYTES)
        with file.open("rb", buffering=0) as handle:
            handle.seek(start)
            handle.readinto(buffer)

    with ThreadPoolExecutor(READERS) as pool:
        for done in [pool.submit(chunks, file, start) for file in files
                     for start in range(0, file.stat().st_size, _CHUNK_BYTES)]:
            done.result()


def saving(model: Any, folder: Path, given: argparse.Namespace) -> rows.Row:
    """Times steps without a save and during a save."""
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-5, max_grad_norm=rows.clip(given))
    generator = torch.Generator().manual_seed(0)
    losses: list[float] = []

    def step() -> float:
        ids = torch.randint(0, model.config.vocab_size, (given.batch, given.length), generator=generator)
        return seconds(lambda: losses.append(float(
            model.megacompile.train_step(dict(input_ids=ids, labels=ids), optimizer))))

    for _ in range(given.warm_up):
        step()
    alone = [step() for _ in range(given.steps)]
    with CheckpointWriter(folder, model, optimizer) as writer:
        begun = time.perf_counter()
        writer.save()
        fixed_s = time.perf_counter() - begun
        beside = [step()]
        while rows.anywhere(writer.saving):
            beside.append(step())
        saved = writer.wait()
        assert saved is not None, "close() would have raised"
    size = sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
    took_s = time.perf_counter() - begun
    return dict(
        losses=losses, times_s=[round(t, 4) for t in alone], times_beside_s=[round(t, 4) for t in beside],
        step_s=round(statistics.median(alone), 4), step_beside_s=round(statistics.mean(beside), 4),
        slow_down=round((fixed_s + sum(beside)) / len(beside) / statistics.median(alone), 4), save_returned_s=round(fixed_s, 3),
        checkpoint_gib=gib(size), save_s=round(took_s, 2), save_gb_per_s=rate(size, took_s))


def main() -> None:
    rows.main("storage", options(), measure)


if __name__ == "__main__":
    main()
