"""Compares losses of a small model on text between optimizers and formats of their state, over several seeds.

    python benchmarks/optimizer_state.py --output benchmarks/results/optimizer-state.jsonl

All runs of a seed start from the same weights and see the same batches; each byte of the text is a token. Streamed models have
bf16 weights. Native models have fp32 weights, with AdamW of PyTorch, and with 8-bit AdamW of torchao and bitsandbytes where
these are installed. The text is this project's documentation unless other files are given; its last tenth is held out. The
table has the loss there after training, as the mean and the deviation over seeds, and the mean of the differences to the first
row of the same kind with the same seed.
"""
from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rows import append, commit, machine
from tabulate import tabulate
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

import megacompile
from megacompile import training
from megacompile.corpus import ByteTokenizer, read_text

ROOT = Path(__file__).resolve().parent.parent
LENGTH, ROWS = 128, 8
ADAMW: dict[str, Any] = dict(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)

Make = Callable[[Any], torch.optim.Optimizer]


def _ours(kind: Any, **options: Any) -> Make:
    return lambda parameters: kind(parameters, max_grad_norm=1.0, **options)


def _torchao(parameters: Any) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit
    return AdamW8bit(parameters, **ADAMW)


def _bitsandbytes(parameters: Any) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit
    return AdamW8bit(parameters, **ADAMW)


#: Runs with streamed models, then native ones; the first of each is what the others are compared with.
STREAMED: dict[str, Make] = {
    "AdamW": _ours(megacompile.AdamW, **ADAMW),
    "AdamW, bfloat16 state": _ours(megacompile.AdamW, **ADAMW, state_dtype="bfloat16"),
    "AdamW, 8-bit state": _ours(megacompile.AdamW, **ADAMW, state_dtype="8bit"),
    "AdamW, bfloat16 master": _ours(megacompile.AdamW, **ADAMW, master="bfloat16"),
    "AdamW, 8-bit state, bfloat16 master": _ours(megacompile.AdamW, **ADAMW, state_dtype="8bit", master="bfloat16"),
    "Muon": _ours(megacompile.Muon, **ADAMW),
    "Muon, 8-bit state": _ours(megacompile.Muon, **ADAMW, state_dtype="8bit"),
}
NATIVE: dict[str, Make] = {
    "PyTorch AdamW": lambda parameters: torch.optim.AdamW(parameters, **ADAMW),
    "torchao 8-bit AdamW": _torchao, "bitsandbytes 8-bit AdamW": _bitsandbytes,
}


def build(seed: int) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(Qwen2Config(
        vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH)).float().train()


def batches(tokens: Tensor, seed: int, rows: int = ROWS, length: int = LENGTH) -> Iterator[dict[str, Tensor]]:
    """Windows at random positions."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        begins = torch.randint(len(tokens) - length, (rows,), generator=generator).tolist()
        ids = torch.stack([tokens[begin:begin + length] for begin in begins])
        yield {"input_ids": ids, "labels": ids.clone()}


@torch.no_grad()
def held_out_loss(model: Any, tokens: Tensor, rows: int = 16, length: int = LENGTH, device: str = "cpu") -> float:
    """The mean loss of a plain model over the held-out text, in fp32, so many rows at a time."""
    windows = tokens[:len(tokens) // length * length].view(-1, length)[:256].to(device)
    model = model.to(device).float().eval()
    return statistics.mean(model(input_ids=part, labels=part).loss.item() for part in windows.split(rows))


def learn(model: Any, optimizer: torch.optim.Optimizer, data: Iterator[dict[str, Tensor]], steps: int, clip: bool,
          decay: training.Decay = training.Decay.COSINE) -> list[float]:
    """The losses of the steps. `clip`: clips gradients to a norm of 1 before the optimizer sees them."""
    losses, warmup = [], 0 if decay is training.Decay.CONSTANT else steps // 10
    schedule = training.warmup_then_decay(optimizer, steps, warmup=warmup, decay=decay, final=0.1)
    for _ in range(steps):
        loss = model(**next(data)).loss
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(make: Make, streams: bool, seed: int, steps: int, learned: Tensor, held_out: Tensor) -> tuple[list[float], float]:
    """(the losses of the steps, the loss on the held-out text)."""
    model, data = build(seed), batches(learned, seed)
    if streams:
        model = megacompile.stream(model.bfloat16(), device="cpu")
    losses = learn(model, make(model.parameters()), data, steps, clip=not streams)
    if streams:
        model.megacompile.close()
    return losses, held_out_loss(model, held_out)


def runs() -> dict[str, tuple[Make, bool]]:
    """Each run by name, and whether its model is streamed; without peers that are not installed."""
    native = {name: make for name, make in NATIVE.items()
              if name.startswith("PyTorch") or importlib.util.find_spec(name.split()[0]) is not None}
    return {name: (make, True) for name, make in STREAMED.items()} | {name: (make, False) for name, make in native.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--text", type=Path, nargs="*", default=sorted((ROOT / "docs").rglob("*.md")))
    parser.add_argument("--output", type=Path, help="append the losses to this JSON-lines file")
    options = parser.parse_args()
    tokens = read_text(options.text, ByteTokenizer()).long()
    learned, held_out = tokens.split([len(tokens) * 9 // 10, len(tokens) - len(tokens) * 9 // 10])
    found: dict[str, list[float]] = {}
    for name, (make, streams) in runs().items():
        for seed in range(options.seeds):
            losses, final = run(make, streams, seed, options.steps, learned, held_out)
            found.setdefault(name, []).append(final)
            print(f"{name}, seed {seed}: {final:.4f}", flush=True)
            if options.output:
                append(options.output, {"run": name, "seed": seed, "steps": options.steps, "losses": losses, "held_out": final,
                                        **machine("cpu"), "commit": commit()})
    print(tabulate([_row(name, found, streams) for name, (_, streams) in runs().items()],
                   ["", "held-out loss", "deviation over seeds", "difference"], tablefmt="github", disable_numparse=True))


def _row(name: str, found: dict[str, list[float]], streams: bool) -> tuple[str, str, str, str]:
    first = found[next(iter(STREAMED if streams else NATIVE))]
    differences = [loss - other for loss, other in zip(found[name], first, strict=True)]
    deviation = statistics.stdev(found[name]) if len(found[name]) > 1 else 0.0
    difference = "" if found[name] is first else f"{statistics.mean(differences):+.4f}"
    return name, f"{statistics.mean(found[name]):.4f}", f"{deviation:.4f}", difference


if __name__ == "__main__":
    main()
