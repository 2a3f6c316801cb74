"""Compares the losses of small models trained natively and streamed, in float32 on text. Prints the largest difference.

    python benchmarks/curves.py --steps 200 --output benchmarks/results/curves.jsonl

Both start from the same weights and see the same batches. Native training uses PyTorch with the model's own attention and
AdamW from `torch.optim`; streamed training is a loop of forward, backward and step with `megacompile.AdamW`. A third run,
native with the rows of each batch in reverse order, shows the effect of rounding: the slightest change can make a router send
a token to another expert. The text is this project's documentation unless other files are given; each byte is a token.
"""
from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from rows import append, commit, machine
from torch import Tensor

import megacompile
from megacompile.corpus import ByteTokenizer, read_text

ROOT = Path(__file__).resolve().parent.parent
SIZES: dict[str, Any] = dict(vocab_size=256, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                             num_hidden_layers=4, max_position_embeddings=256)
#: Families of models, with their characteristic features: mixtures of experts, windows, sinks, linear attention.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", dict(intermediate_size=96, num_local_experts=4, num_experts_per_tok=2)),
    "gemma3": ("Gemma3TextConfig", dict(intermediate_size=128, sliding_window=16, query_pre_attn_scalar=16,
                                        layer_types=["sliding_attention", "full_attention"] * 2)),
    "gpt-oss": ("GptOssConfig", dict(intermediate_size=64, num_local_experts=4, num_experts_per_tok=2, sliding_window=16)),
    "qwen3-next": ("Qwen3NextConfig", dict(
        intermediate_size=96, moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=4,
        num_experts_per_tok=2, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
        linear_num_value_heads=4)),
}


def build(family: str) -> Any:
    """A model with random weights, in training mode."""
    name, changes = FAMILIES[family]
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**{**SIZES, **changes}),
                                                         attn_implementation="eager").float().train()


def batches(files: list[Path]) -> Iterator[dict[str, Tensor]]:
    """Batches of four windows of 64 bytes at random positions."""
    tokens = read_text(files, ByteTokenizer()).long()
    generator = torch.Generator().manual_seed(0)
    while True:
        begins = torch.randint(len(tokens) - 64, (4,), generator=generator).tolist()
        ids = torch.stack([tokens[begin:begin + 64] for begin in begins])
        yield {"input_ids": ids, "labels": ids.clone()}


def losses(model: Any, optimizer: torch.optim.Optimizer, data: Iterator[dict[str, Tensor]], steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        loss = model(**next(data)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def reversed_rows(data: Iterator[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    for batch in data:
        yield {name: tensor.flip(0) for name, tensor in batch.items()}


def curves(family: str, steps: int, files: list[Path], learning_rate: float) -> dict[str, list[float]]:
    """The losses of native training, of streamed training, and of native training with reversed rows."""
    first = build(family)
    models = {"native": first, "streamed": megacompile.stream(copy.deepcopy(first), device="cpu", micro_batch_size=2),
              "reversed": copy.deepcopy(first)}
    found = {}
    for name, model in models.items():
        optimizer = (megacompile.AdamW if name == "streamed" else torch.optim.AdamW)(model.parameters(), lr=learning_rate)
        data = batches(files) if name != "reversed" else reversed_rows(batches(files))
        found[name] = losses(model, optimizer, data, steps)
    models["streamed"].megacompile.close()
    return found


def largest_difference(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def text() -> list[Path]:
    return sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="families (default: all)")
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: 200)")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="learning rate (default: 3e-4)")
    parser.add_argument("--text", type=Path, nargs="+", default=text(), help="text files (default: README.md and docs)")
    parser.add_argument("--output", type=Path, help="append JSON lines to this file")
    given = parser.parse_args()
    for family in given.family:
        found = curves(family, given.steps, given.text, given.learning_rate)
        difference = largest_difference(found["native"], found["streamed"])
        rounding = largest_difference(found["native"], found["reversed"])
        print(f"{family}: loss {found['native'][0]:.4f} to {found['native'][-1]:.4f} in {given.steps} steps, largest "
              f"difference {difference:.1e} (native with rows reversed: {rounding:.1e})", flush=True)
        row = dict(family=family, steps=given.steps, learning_rate=given.learning_rate, largest_difference=difference,
                   largest_difference_of_reversed_rows=rounding, **found, transformers=transformers.__version__,
                   **machine("cpu"), commit=commit())
        if given.output is not None:
            append(given.output, row)


if __name__ == "__main__":
    main()
