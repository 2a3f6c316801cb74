"""Compares losses of LoRA over frozen weights in bfloat16, four and eight bits, streamed and in plain PyTorch, over seeds.

    python benchmarks/quantized.py --output benchmarks/results/quantized.jsonl

For each seed, a small model learns this project's documentation, a byte as a token. Then an adapter learns its source code,
from the same initial values and on the same batches in every run. The native runs are PEFT's, over bfloat16 weights and, where
bitsandbytes is installed, over its four-bit weights. The table has the loss on held-out code, as the mean and the deviation
over seeds, and for streamed runs the mean of the absolute differences between the losses of their steps and those of the native
run with the same weights.
"""
from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from optimizer_state import batches, build, held_out_loss, learn
from peft import LoraConfig, get_peft_model
from rows import append, commit, machine
from tabulate import tabulate
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import megacompile
from megacompile import training
from megacompile.corpus import ByteTokenizer, read_text

ROOT = Path(__file__).resolve().parent.parent
LORA = dict(r=8, lora_alpha=16, target_modules="all-linear")
NF4 = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)


def _plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def _bitsandbytes(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cpu",
                                                quantization_config=BitsAndBytesConfig(**NF4))


def _rounded(stored: str) -> Callable[[Path], Any]:
    return lambda folder: megacompile.quantize(_plain(folder).requires_grad_(False), stored)


#: Run -> how its model is loaded, whether it is streamed, and the native run with the same weights.
RUNS: dict[str, tuple[Callable[[Path], Any], bool, str]] = {
    "bfloat16, PEFT": (_plain, False, ""),
    "bfloat16, streamed": (_plain, True, "bfloat16, PEFT"),
    "nf4, PEFT with bitsandbytes": (_bitsandbytes, False, ""),
    "nf4 of bitsandbytes, streamed": (_bitsandbytes, True, "nf4, PEFT with bitsandbytes"),
    "nf4, streamed": (_rounded("nf4"), True, "nf4, PEFT with bitsandbytes"),
    "int8, streamed": (_rounded("int8"), True, ""),
}


def text(folder: str, pattern: str) -> tuple[Tensor, Tensor]:
    """Bytes to learn, and the last tenth of the text."""
    tokens = read_text(sorted((ROOT / folder).rglob(pattern)), ByteTokenizer()).long()
    boundary = len(tokens) * 9 // 10
    return tokens[:boundary], tokens[boundary:]


def base(seed: int, steps: int, folder: Path) -> None:
    """Trains the model that all adapters of a seed are put on."""
    model, data = build(seed), batches(text("docs", "*.md")[0], seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    learn(model, optimizer, data, steps, clip=True, decay=training.Decay.CONSTANT)
    model.bfloat16().save_pretrained(folder)


def adapt(load: Callable[[Path], Any], streams: bool, folder: Path, seed: int, steps: int,
          code: tuple[Tensor, Tensor]) -> tuple[list[float], float]:
    """(the losses of the steps, the loss on held-out code)."""
    torch.manual_seed(seed)
    model, data = load(folder), batches(code[0], seed)
    torch.manual_seed(seed)
    model = get_peft_model(model, LoraConfig(**LORA)).train()
    kind: Any = torch.optim.AdamW
    if streams:
        model, kind = megacompile.stream(model, device="cpu"), megacompile.AdamW
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = kind(trained, lr=2e-3, weight_decay=0.0)
    losses = learn(model, optimizer, data, steps, clip=False)
    if streams:
        model.megacompile.close()
    return losses, held_out_loss(model, code[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200, help="steps of an adapter; its model learns twice as many")
    parser.add_argument("--output", type=Path, help="append the losses to this JSON-lines file")
    options = parser.parse_args()
    installed = importlib.util.find_spec("bitsandbytes") is not None
    chosen = {name: run for name, run in RUNS.items() if installed or "bitsandbytes" not in name}
    code, found = text("megacompile", "*.py"), dict[str, list[tuple[list[float], float]]]()
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            base(seed, 2 * options.steps, Path(folder))
            for name, (load, streams, _) in chosen.items():
                losses, final = adapt(load, streams, Path(folder), seed, options.steps, code)
                found.setdefault(name, []).append((losses, final))
                print(f"{name}, seed {seed}: {losses[0]:.4f} -> {final:.4f}", flush=True)
                if options.output:
                    append(options.output, {"run": name, "seed": seed, "steps": options.steps, "losses": losses,
                                            "held_out": final, **machine("cpu"), "commit": commit()})
    headers = ["", "held-out loss", "deviation over seeds", "difference of steps"]
    print(tabulate([_row(name, found, chosen[name][2]) for name in chosen], headers, tablefmt="github", disable_numparse=True))


def _row(name: str, found: dict[str, list[tuple[list[float], float]]], native: str) -> tuple[str, ...]:
    finals = [final for _, final in found[name]]
    deviation = statistics.stdev(finals) if len(finals) > 1 else 0.0
    apart = "" if native not in found else statistics.mean(
        abs(a - b) for (ours, _), (theirs, _) in zip(found[name], found[native], strict=True)
        for a, b in zip(ours, theirs, strict=True))
    return name, f"{statistics.mean(finals):.4f}", f"{deviation:.4f}", f"{apart:.4f}" if apart != "" else ""


if __name__ == "__main__":
    main()
