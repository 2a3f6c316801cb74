"""What the dropout of one forward is drawn from: one number of PyTorch's global generator, and where each micro-batch lies.

`torch.manual_seed` makes a run repeatable, and a checkpoint that keeps the generator's state lets it go on as it would have.
A model without dropout draws nothing.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megacompile.frontend.capture import CapturedModel


def draw(captured: CapturedModel, micro_batches: Sequence[int], device: torch.device) -> Tensor | None:
    """int64 [micro-batches, calls, 5], as `megacompile.frontend.graph.randomness` reads it; None if the model draws nothing."""
    if not any(source.kind == "random" for call in captured.calls for source in call.sources):
        return None
    seed = int(torch.randint(1 << 62, ()))
    first, drawn = 0, []
    for rows in micro_batches:
        drawn.append([[seed, call, first, rows, sum(micro_batches)] for call in range(len(captured.calls))])
        first += rows
    return torch.tensor(drawn, dtype=torch.int64).to(device)
