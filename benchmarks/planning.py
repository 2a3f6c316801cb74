"""Measures how long planning takes: capturing and planning models on the meta device, each in its own process.

    python benchmarks/planning.py --output benchmarks/results/planning.jsonl                   # training loops
    python benchmarks/planning.py --train-step --output benchmarks/results/planning.jsonl      # whole steps

Reports processor seconds, wall-clock seconds, and the peak resident set, which includes Python and PyTorch. Needs no GPU and
no weights.
"""
from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from pathlib import Path
from typing import Any

import tabulate
from rows import append, commit, machine

#: Name -> (class of the config, its fields). Vocabularies and tied heads are those of the published models.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "1B": ("LlamaConfig", dict(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
                               num_attention_heads=32, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True)),
    "8B": ("LlamaConfig", dict(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                               num_attention_heads=32, num_key_value_heads=8)),
    "72B": ("Qwen2Config", dict(vocab_size=152064, hidden_size=8192, intermediate_size=29568, num_hidden_layers=80,
                                num_attention_heads=64, num_key_value_heads=8)),
    "GPT-OSS-120B": ("GptOssConfig", dict(vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=36,
                                          num_attention_heads=64, num_key_value_heads=8, head_dim=64, num_local_experts=128,
                                          num_experts_per_tok=4, sliding_window=128)),
}


def measure(shape: str, batch: int, length: int, hardware: str, train_step: bool) -> dict[str, Any]:
    """The row of a shape, measured in this process."""
    import torch
    import transformers

    import megacompile
    from megacompile import api

    def timed(*given: Any, **options: Any) -> Any:
        before = time.process_time()
        captured = capture(*given, **options)
        row["capture_processor_s"], row["capture_s"] = time.process_time() - before, captured.seconds
        return captured

    row: dict[str, Any] = {}
    capture, api.capture = api.capture, timed
    name, fields = SHAPES[shape]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**fields), dtype=torch.bfloat16)
    started, clock = time.process_time(), time.perf_counter()
    # A 72B or 120B model needs more host memory than any hardware profile has.
    megacompile.schedule(model, batch=batch, length=length, hardware=hardware, host_memory="4TiB", whole_step=train_step)
    row["plan_processor_s"] = time.process_time() - started - row["capture_processor_s"]
    row["plan_s"] = time.perf_counter() - clock - row["capture_s"]
    return {
        "benchmark": "planning", "shape": shape, "parameters": sum(p.numel() for p in model.parameters()), "batch": batch,
        "length": length, "hardware": hardware, "train_step": train_step, **row,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "commit": commit(), **machine("cpu")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES),
                        help=f"shapes to measure: {', '.join(SHAPES)} (default: all)")
    parser.add_argument("--batch", type=int, default=64, help="sequences per step (default: 64)")
    parser.add_argument("--length", type=int, default=1024, help="tokens per sequence (default: 1024)")
    parser.add_argument("--hardware", default="h200", help="hardware profile to plan for (default: h200)")
    parser.add_argument("--train-step", action="store_true", help="plan a whole step, including the choice of waves")
    parser.add_argument("--output", type=Path, help="append JSON lines to this file")
    arguments = parser.parse_args()
    rows = []
    for shape in arguments.shapes:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            row = pool.apply(measure, (shape, arguments.batch, arguments.length, arguments.hardware, arguments.train_step))
        rows.append(row)
        if arguments.output:
            append(arguments.output, row)
        print(json.dumps(row), flush=True)
    print(tabulate.tabulate(
        [(row["shape"], row["parameters"] / 1e9, row["capture_processor_s"], row["plan_processor_s"],
          row["capture_s"] + row["plan_s"], row["peak_bytes"] / 2**30) for row in rows],
        ("shape", "parameters, billion", "capture, s", "plan, s", "both, wall-clock s", "memory, GiB"), "github",
        floatfmt=".1f"))


if __name__ == "__main__":
    main()
