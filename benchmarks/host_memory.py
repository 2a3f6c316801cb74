"""Prints host memory by model size, from 1B to 120B: predicted from the config, and measured by benchmark rows.

    python benchmarks/host_memory.py --plot docs/pictures/host-memory.svg

Predicted: the bytes of the tiles of a model on the meta device, which is traced as `stream` does. Measured: the resident set
of the processes that measured the rows of `benchmarks/results/step.jsonl`, for plans that keep nothing else on the host.
"""
from __future__ import annotations

import argparse
from pathlib import Path

import rows
import tabulate
import torch
from shapes import SHAPES, config
from transformers import AutoModelForCausalLM, Qwen2Config

from megacompile.api import analyse
from megacompile.picture import check_matplotlib
from megacompile.planning.config import StreamConfig

HERE = Path(__file__).parent
GIB = 2**30
#: Hidden size, intermediate size, layers, heads, key-value heads; untied, with Qwen2's vocabulary.
SIZES = {"1B": (1536, 4608, 24, 12, 2), "3B": (2048, 11008, 36, 16, 2), "72B": (8192, 29568, 80, 64, 8),
         "120B": (10240, 36864, 88, 80, 8)}


def shapes() -> list[Qwen2Config]:
    vocabulary = SHAPES["qwen2-7b"]["vocab_size"]
    found = [Qwen2Config(vocab_size=vocabulary, hidden_size=hidden, intermediate_size=wide, num_hidden_layers=layers,
                         num_attention_heads=heads, num_key_value_heads=groups, tie_word_embeddings=False)
             for hidden, wide, layers, heads, groups in SIZES.values()]
    return found + [config(shape) for shape in ("qwen2-14b", "qwen2-32b")]


def predicted(shape: Qwen2Config) -> tuple[int, int]:
    """(parameters, bytes of host memory) of a shape."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    _, tiling = analyse(model, StreamConfig.of(device="cuda"), "cuda", None, None)
    return sum(p.numel() for p in model.parameters()), tiling.host_bytes()


def measured() -> dict[tuple[str, int], float]:
    """(Shape, layers) -> the largest resident set in GiB of rows whose plans keep only tiles on the host."""
    found: dict[tuple[str, int], float] = {}
    for row in rows.read(HERE / "results/step.jsonl"):
        if row["system"] == "megacompile" and not row.get("host_checkpoints") and row["host_bytes_per_parameter"] <= 14.001:
            key = row["shape"], row["layers"]
            found[key] = max(found.get(key, 0.0), row["resident_set_gib"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="also draw the table to this file (.svg or .png)")
    given = parser.parse_args()
    if given.plot is not None:
        check_matplotlib()
    points: list[tuple[int, int, float | None]] = [
        *((*predicted(shape), None) for shape in shapes()),
        *((*predicted(config(shape, layers)), size) for (shape, layers), size in measured().items())]
    points.sort(key=lambda point: point[0])
    table = [[f"{count / 1e9:.2f}", f"{size / GIB:.1f}", f"{size / count:.3f}", "" if there is None else f"{there:.1f}"]
             for count, size, there in points]
    print(tabulate.tabulate(table, ["parameters, billion", "predicted, GiB", "bytes/parameter", "measured, GiB"], "github",
                            disable_numparse=True))
    if given.plot is not None:
        draw(points, given.plot)


def draw(points: list[tuple[int, int, float | None]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([count / 1e9 for count, _, _ in points], [size / GIB for _, size, _ in points], marker=".", label="predicted")
    there = [(count / 1e9, size) for count, _, size in points if size is not None]
    axes.plot(*zip(*there, strict=True), "x", label="measured (resident set)")
    axes.set_xlabel("parameters, billion")
    axes.set_ylabel("host memory, GiB")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
