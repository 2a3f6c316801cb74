"""A rank that trains a mixture on rows of its own and moves the biases of its routers. See test_ranks_experts.py."""
from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from test_expert_adapters import base, tokens

import megacompile

STEPS, RATE = 2, 0.01


def rows_of(model: Any, step: int, rank: int) -> dict[str, torch.Tensor]:
    return tokens(model, 10 * step + rank, rows=2, length=8)  # as long on each rank: padding would count


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
