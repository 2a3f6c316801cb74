"""Compares losses of models whose layers multiply in bfloat16 and in float8, over recipes and seeds.

    python benchmarks/precision.py --output benchmarks/results/precision.jsonl                  # a small model, on a CPU
    python benchmarks/precision.py --device cuda --size 100m --steps 1000 --text book.txt ...   # 100 M parameters, on a GPU
    python benchmarks/precision.py ... --seeds 0 --runs float8 --device-memory 16GiB          # one of several runs at a time

All runs of a seed start from the same weights and see the same batches; each byte of the text is a token. Weights are in
bfloat16 with FP32 masters, and AdamW clips. On a CPU float8 is emulated. The text is this project's documentation unless other
files are given; its last tenth is held out. Rows that are in the output already are not measured again.

The table has the loss on the held-out text, as the mean and the deviation over seeds, the difference to bfloat16 with the same
seed, and the least cosine between a layer's gradient and that of the same weights in float32, at the start and at the end.
"""
from __future__ import annotations

import argparse
import copy
import dataclasses
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from optimizer_state import batches, held_out_loss, learn
from rows import Row, append, commit, machine, measured_before
from tabulate import tabulate
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

import megacompile
from megacompile import Float8
from megacompile.corpus import ByteTokenizer, read_text

ROOT = Path(__file__).resolve().parent.parent
#: Size -> the model's config, sequences per step, their length, the peak learning rate.
SIZES: dict[str, tuple[dict[str, int], int, int, float]] = {
    "small": (dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4),
              8, 128, 3e-3),
    "100m": (dict(hidden_size=768, intermediate_size=2304, num_hidden_layers=14, num_attention_heads=12,
                  num_key_value_heads=12), 32, 1024, 6e-4)}
_SMALLEST = Float8(min_features=64)
RECIPES: dict[str, Float8 | None] = {
    "bfloat16": None,
    "float8": _SMALLEST,
    "float8, gradients in e4m3": dataclasses.replace(_SMALLEST, gradients="e4m3"),
    "float8, weight gradients in bfloat16": dataclasses.replace(_SMALLEST, weight_gradients="bfloat16"),
    "float8, scales of rows": dataclasses.replace(_SMALLEST, scaling="row", gradients="e4m3"),
}


def build(size: str, seed: int) -> Any:
    sizes, _, length, _ = SIZES[size]
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(Qwen2Config(
        vocab_size=256, max_position_embeddings=length, tie_word_embeddings=False, **sizes)).bfloat16().train()


def cosines(model: Any, batch: dict[str, Tensor], device: str) -> list[float]:
    """For each layer, the cosine between its gradient and that of a plain model with the same weights in float32."""
    model(**batch).loss.backward()
    ours = {name: p.grad.float() for name, p in model.named_parameters()}
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(model.config)).float()
    plain.load_state_dict(model.state_dict())
    plain.to(device).train()(**{name: each.to(device) for name, each in batch.items()}).loss.backward()
    theirs = {name: p.grad.cpu() for name, p in plain.named_parameters()}
    model.zero_grad()
    if device == "cuda":
        torch.cuda.empty_cache()  # the plain model keeps all its activations, and runs of other seeds may share the GPU
    layers = [f"model.layers.{number}." for number in range(model.config.num_hidden_layers)]
    # In float64: sums of millions of squares in float32 give cosines above 1.
    both = [[torch.cat([g[n].flatten().double().cpu() for n in g if n.startswith(layer)]) for g in (ours, theirs)]
            for layer in layers]
    return [float(torch.cosine_similarity(one, other, dim=0)) for one, other in both]


def run(recipe: Float8 | None, size: str, seed: int, steps: int, device: str, memory: str | None, learned: Tensor,
        held_out: Tensor) -> Row:
    """The losses of a run, and what the table has of it."""
    if recipe is not None and device == "cpu":
        recipe = dataclasses.replace(recipe, emulated=True)
    began, (_, rows, length, rate) = time.perf_counter(), SIZES[size]
    model = megacompile.stream(build(size, seed), device=device, precision=recipe, device_memory=memory,
                               compile=None if device == "cuda" else False)
    checked = next(batches(held_out, 0, rows, length))
    before = cosines(model, checked, device)
    optimizer = megacompile.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=1.0)
    learning = time.perf_counter()
    losses = learn(model, optimizer, batches(learned, seed, rows, length), steps, clip=False)
    learned_s = time.perf_counter() - learning
    after = cosines(model, checked, device)
    model.megacompile.close()
    return {"losses": losses, "held_out": held_out_loss(model, held_out, rows, length, device), "cosines_before": before,
            "cosines_after": after, "learned_s": round(learned_s, 1), "seconds": round(time.perf_counter() - began, 1)}


_COSINES = ("cosines_before", "cosines_after")


def table(rows: Sequence[Row]) -> str:
    by_run: dict[str, dict[int, Row]] = {}
    for row in rows:
        by_run.setdefault(row["run"], {})[row["seed"]] = row
    lines = []
    for name, seeds in by_run.items():
        finals = [row["held_out"] for row in seeds.values()]
        apart = [row["held_out"] - by_run["bfloat16"][seed]["held_out"] for seed, row in seeds.items()
                 if seed in by_run.get("bfloat16", {})]
        relative = statistics.mean(apart) / statistics.mean(finals) if apart else 0.0
        lines.append((name, f"{statistics.mean(finals):.4f}", f"{statistics.stdev(finals) if len(finals) > 1 else 0:.4f}",
                      f"{statistics.mean(apart):+.4f}" if apart else "", f"{relative:+.2%}",
                      *(f"{min(min(row[when]) for row in seeds.values()):.4f}" for when in _COSINES)))
    headers = ["", "held-out loss", "deviation over seeds", "difference", "relative", "least cosine, start", "end"]
    return str(tabulate(lines, headers, tablefmt="github", disable_numparse=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--runs", nargs="*", choices=tuple(RECIPES), default=list(RECIPES))
    parser.add_argument("--text", type=Path, nargs="*", default=sorted((ROOT / "docs").rglob("*.md")))
    parser.add_argument("--limit-minutes", type=float, default=float("inf"), help="begin no run after so many minutes")
    parser.add_argument("--device-memory", help='budget of a run, such as "16GiB" (default: the free memory)')
    parser.add_argument("--output", type=Path, help="append rows to this JSON-lines file")
    options = parser.parse_args()
    tokens = read_text(options.text, ByteTokenizer()).long()
    learned, held_out = tokens.split([len(tokens) * 9 // 10, len(tokens) - len(tokens) * 9 // 10])
    what: Row = {"size": options.size, "steps": options.steps, "bytes": len(tokens), **machine(options.device)}
    if options.device_memory is not None:
        what["device_memory"] = options.device_memory
    wanted = [{"run": name, "seed": seed, **what} for seed in options.seeds for name in options.runs]
    began, found = time.perf_counter(), []
    for row in wanted:
        done = measured_before(options.output, row)
        if done is None and time.perf_counter() - began < 60 * options.limit_minutes:
            measured = run(RECIPES[row["run"]], options.size, row["seed"], options.steps, options.device,
                           options.device_memory, learned, held_out)
            done = {**row, **measured, "commit": commit()}
            print(f"{row['run']}, seed {row['seed']}: {done['held_out']:.4f}, {done['seconds']:.0f} s", flush=True)
            if options.output is not None:
                append(options.output, done)
        found += [done] if done is not None else []
    print(table(found))


if __name__ == "__main__":
    main()
