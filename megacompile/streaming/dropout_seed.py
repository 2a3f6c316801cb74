"""The seed of one forward's dropout: one number from PyTorch's global generator, and the position of each micro-batch.

`torch.manual_seed` makes a run repeatable. A checkpoint that stores the generator's state continues the same sequence. A model
without dropout draws nothing.
"""
from __future__ import annotations

import torch
from torch import Tensor

from megacompile.frontend.capture import CapturedModel
from megacompile.ir.plan import Plan


def seed_of_forward(captured: CapturedModel) -> int | None:
    """A new seed. None for a model without dropout."""
    if not any(source.kind == "random" for call in captured.calls for source in call.sources):
        return None
    return int(torch.randint(1 << 62, ()))


def positions(seed: int, captured: CapturedModel, plan: Plan, first: int, total: int, device: torch.device) -> Tensor:
    """int64 [micro-batches, calls, 5], in the format that `megacompile.frontend.graph.randomness` reads. `first`: the number of
    the first row, of `total` rows.

    An element's place in the batch is counted in rows of its micro-batch's length. Rows of another length have another seed,
    since elements of theirs would have the same places."""
    drawn = []
    for rows, length in plan.sizes:
        drawn.append([[seed + plan.length - length, call, first, rows, total] for call in range(len(captured.calls))])
        first += rows
    return torch.tensor(drawn, dtype=torch.int64).to(device)
