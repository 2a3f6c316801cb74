"""What each rank of a job with a model that branches on lengths has seen: losses of steps, and the captures that it took."""
from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from chunked_models import Layer, model_of, tokens
from rank_models import RANK, SIZE

import megacompile

#: Lengths of the steps, and of evaluations before them that only the last rank makes.
STEPS, EVALUATED = (17, 8, 3, 12), (16, 2)

if __name__ == "__main__":
    model = megacompile.stream(model_of(Layer), device="cpu", compile=False)
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
    if RANK == SIZE - 1:
        with torch.no_grad():
            for length in EVALUATED:
                model(input_ids=tokens(length))
    losses, traced = [], []
    for length in STEPS:
        ids = tokens(length, rows=2 * SIZE)[RANK::SIZE]
        losses.append(float(model.megacompile.train_step({"input_ids": ids, "labels": ids}, optimizer)))
        traced.append(model.megacompile.compiled().spec.capture.traced_length)
    model.megacompile.close()
    (Path(os.environ["RESULTS"]) / f"{RANK}.json").write_text(json.dumps([losses, traced]))
