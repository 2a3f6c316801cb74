"""A rank that trains a mixture on rows of its own and moves the biases of its routers. See test_ranks_experts.py."""
from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from test_expert_adapters import base
from test_expert_loads import padded

import megacompile

STEPS, RATE = 2, 0.01


def rows_of(model: Any, step: int, rank: int) -> dict[str, torch.Tensor]:
    """Ranks pad each other's rows in the first step, and share their sequences in the second."""
    batch = padded(model, ((8, 8), (5, 5), (3, 9), (4, 6, 2))[2 * step + rank], seed=10 * step + rank)
    return batch if step else {name: tensor for name, tensor in batch.items() if name != "attention_mask"}


def main() -> None:
    rank, native = int(os.environ["RANK"]), base("deepseek_v3")
    model = megacompile.stream(native, device="cpu")
    optimizer = megacompile.AdamW(model.parameters(), lr=0.0)
    for step in range(STEPS):
        model.megacompile.train_step(rows_of(native, step, rank), optimizer)
        model.megacompile.balance_experts(RATE)
    biases = {name: bias.tolist() for name, bias in model.named_buffers() if name.endswith("e_score_correction_bias")}
    Path(os.environ["RESULTS"], f"{rank}.json").write_text(json.dumps(biases))
    model.megacompile.close()


if __name__ == "__main__":
    main()
