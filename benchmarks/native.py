"""Measures a row of native PyTorch: the same shape and batches, with weights, gradients and optimizer state on the device.

    python benchmarks/native.py --layers 28 --batch 64 --checkpointing                       # the usual way
    python benchmarks/native.py --layers 28 --batch 64 --micro-batch-size 8 --compile        # the fastest way found

Weights, gradients and both moments are bf16, the optimizer is PyTorch's fused AdamW, and gradients are clipped by their norm.
Other options are in between: checkpointing only some layers (`--checkpoint-layers`), or keeping results that are expensive to
recompute (`--keep`). `--float8 RECIPE` computes the linear layers of decoder layers with torchao's float8 training, by one of
its recipes.
"""
from __future__ import annotations

import argparse
import contextlib
import functools
import os
import time
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import rows
import torch
from shapes import random_model
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from megacompile.codegen.scaled_products import ALIGNMENT
from megacompile.compat import fla
from megacompile.errors import MegacompileError
from megacompile.ir.precision import Float8

_aten = torch.ops.aten
ATTENTION = [_aten._scaled_dot_product_flash_attention.default, _aten._scaled_dot_product_cudnn_attention.default,
             _aten._scaled_dot_product_efficient_attention.default, _aten._scaled_dot_product_flash_attention_for_cpu.default]
#: Operations whose results a checkpointed layer keeps with `--keep`.
KEPT = {"attention": ATTENTION, "products": [*ATTENTION, _aten.mm.default, _aten.addmm.default, _aten.bmm.default]}

#: torchao's recipes for float8 training.
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def options() -> argparse.ArgumentParser:
    parser = rows.parser(__doc__)
    parser.add_argument("--checkpointing", action="store_true", help="keep only the inputs of layers and recompute the rest")
    parser.add_argument("--checkpoint-layers", type=int,
                        help="with --checkpointing: number of layers, counted from the first, to checkpoint (default: all)")
    parser.add_argument("--keep", choices=KEPT, help="with --checkpointing: also keep the results of these operations")
    parser.add_argument("--compile", action="store_true", help="compile each layer with torch.compile")
    parser.add_argument("--float8", choices=RECIPES,
                        help="compute linear layers of decoder layers with torchao's float8 training")
    return parser


def measure(given: argparse.Namespace) -> rows.Row:
    started = time.perf_counter()
    if not given.checkpointing and (given.checkpoint_layers is not None or given.keep):
        raise MegacompileError("--checkpoint-layers and --keep have no effect without checkpointing: add --checkpointing")
    model = random_model(given.shape, rows.layer_count(given), given.device).to(given.device)
    if given.float8:
        _convert_to_float8(model.model.layers, given.float8)
    prepare(model, given)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    clip = rows.clip(given)
    cuda = given.device == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    setup_s = time.perf_counter() - started
    norm = torch.zeros(())

    def step(ids: Tensor) -> float:
        nonlocal norm
        ids = ids.to(given.device)
        total = torch.zeros((), device=given.device)
        for part in ids.split(given.micro_batch_size or given.batch):
            loss = model(input_ids=part, labels=part, use_cache=False).loss * (len(part) / len(ids))
            loss.backward()
            total += loss.detach()
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        return total.item()

    # Recurrent layers run flash-linear-attention's kernels if it is installed, as ours do.
    with fla.running() if fla.is_usable() else contextlib.nullcontext():
        found = rows.timed(step, given)
    return dict(
        layers=model.config.num_hidden_layers, micro_batch=given.micro_batch_size or given.batch, compiled=given.compile,
        float8=given.float8, checkpointing=given.checkpointing, checkpoint_layers=given.checkpoint_layers, keep=given.keep,
        max_grad_norm=clip, **rows.rates(model, given, found["step_s"]), **found,
        grad_norm=norm.item() if clip is not None else None,
        peak_device_gib=round(torch.cuda.max_memory_reserved() / 2**30, 2) if cuda else 0.0, setup_s=round(setup_s, 1))


def prepare(model: Any, given: argparse.Namespace) -> None:
    layers = model.model.layers
    if given.checkpointing:
        how: dict[str, Any] = dict(use_reentrant=False)
        if given.keep:
            how["context_fn"] = functools.partial(create_selective_checkpoint_contexts, KEPT[given.keep])
        model.gradient_checkpointing_enable(how)
        for layer in layers[len(layers) if given.checkpoint_layers is None else given.checkpoint_layers:]:
            layer.gradient_checkpointing = False
    if given.compile:
        for layer in layers:
            layer.compile()


def _convert_to_float8(layers: torch.nn.Module, recipe: str) -> None:
    """Replaces linear layers whose sides float8 products allow. Raises `MegacompileError` without torchao."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise MegacompileError(f"--float8 needs torchao ({error}): install it with pip install torchao") from None

    every = Float8(min_features=ALIGNMENT)
    convert_to_float8_training(layers, config=Float8LinearConfig.from_recipe_name(recipe),
                               module_filter_fn=lambda module, name: not every.misfit(*module.weight.shape))


def main() -> None:
    rows.main("native", options(), measure)


if __name__ == "__main__":
    main()
