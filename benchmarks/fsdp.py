"""Measures a row of PyTorch's FSDP2 with everything offloaded to the host: the same shape and batches, with FP32 masters.

    torchrun --standalone --nproc-per-node 2 benchmarks/fsdp.py --layers 16 --batch 64 --micro-batch-size 16

Masters, gradients and moments are FP32 in pinned host memory, the GPUs compute in bf16, layers are checkpointed and compiled,
and gradients are clipped by their norm. Each layer prefetches the next ones. The micro-batches of a step accumulate gradients.
"""
from __future__ import annotations

import argparse
import os
import time
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import rows
import torch
import torch.distributed as dist
from shapes import config
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from megacompile.loading import parameters_on_meta
from megacompile.planning.device import join_group, process_count


def options() -> argparse.ArgumentParser:
    parser = rows.parser(__doc__)
    parser.add_argument("--prefetch", type=int, default=2, help="number of layers that a layer prefetches (default: 2)")
    parser.add_argument("--compile", action="store_true", help="compile each layer with torch.compile")
    return parser


def sharded(given: argparse.Namespace) -> Any:
    """A model with random weights whose shards are in pinned host memory."""
    from transformers import AutoModelForCausalLM

    with parameters_on_meta():
        model: Any = AutoModelForCausalLM.from_config(config(given.shape, rows.layer_count(given)), dtype=torch.float32)
    model.train()
    model.gradient_checkpointing_enable(dict(use_reentrant=False))
    how: dict[str, Any] = dict(
        mesh=init_device_mesh(given.device, (process_count(),)), offload_policy=CPUOffloadPolicy(given.device == "cuda"),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    layers = list(model.model.layers)
    for layer in layers:
        if given.compile:
            layer.compile()
        fully_shard(layer, **how)
    fully_shard(model, **how)
    for number, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[number + 1:number + 1 + given.prefetch])
        layer.set_modules_to_backward_prefetch(layers[max(0, number - given.prefetch):number][::-1])
    buffers = {name: buffer.to(given.device) for name, buffer in model.named_buffers()}
    model.to_empty(device="cpu")
    for name, buffer in buffers.items():  # `to_empty` would lose their values
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = buffer
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = parameter.to_local()
            local.copy_(torch.ones_like(local) if "norm" in name else
                        torch.empty(local.shape, device=given.device).normal_(0, 0.02).cpu())
    return model


def measure(given: argparse.Namespace) -> rows.Row:
    start_processes()
    started = time.perf_counter()
    model = sharded(given)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    clip = rows.clip(given)
    cuda = given.device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    setup_s = time.perf_counter() - started
    norm = torch.zeros(())

    def step(ids: Tensor) -> float:
        nonlocal norm
        total = torch.zeros((), device=given.device)
        for part in ids.split(given.micro_batch_size or given.batch):
            there = part.to(given.device)
            loss = model(input_ids=there, labels=there, use_cache=False).loss * (len(part) / len(ids))
            loss.backward()
            total += loss.detach()
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)  # gloo has no means
        return total.item() / process_count()

    found = rows.timed(step, given)
    total_norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return dict(
        layers=model.config.num_hidden_layers, micro_batch=given.micro_batch_size or given.batch, compiled=given.compile,
        prefetch=given.prefetch, **rows.rates(model, given, found["step_s"]), **found, grad_norm=float(total_norm),
        peak_device_gib=round(torch.cuda.max_memory_reserved() / 2**30, 2) if cuda else 0.0, setup_s=round(setup_s, 1))


def start_processes() -> None:
    """Joins the process group, once; `--help` works without one."""
    if dist.is_initialized():
        return
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    join_group("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // process_count()))


def main() -> None:
    try:
        rows.main("fsdp", options(), measure)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
