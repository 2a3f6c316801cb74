"""Per-token functions for losses that are computed outside of the model.

    targets = next_tokens(labels)
    chosen = model.megacompile.per_token(log_probabilities, {"input_ids": ids}, targets=targets).sum(1)
"""
from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

#: Label of positions that a loss ignores, as in `torch.nn.functional.cross_entropy`.
IGNORED = -100


def next_tokens(labels: Tensor) -> Tensor:
    """The target of each position, [B, T]: the label of the next position, and `IGNORED` at the last one."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def log_probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    """The log-probability of each token's target, float32 [N]; 0 where the target is `IGNORED`. `logits`: [N, V]; `targets`:
    int64 [N]."""
    return -F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="none")
