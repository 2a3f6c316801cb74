"""A decoder whose layers do something else for some lengths of a batch, and batches for it."""
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 4


class Layer(nn.Module):
    """Adds up within chunks, as Mamba2 does: the code differs for one chunk, and for chunks that are whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.tanh(self.first(x))
        empty = -x.shape[1] % CHUNK
        if empty > 0:
            made = F.pad(made, (0, 0, 0, empty))
        if made.shape[1] > CHUNK:
            made = made.unflatten(1, (-1, CHUNK)).cumsum(2).flatten(1, 2)
        return x + made[:, :x.shape[1]]


class Decoder(nn.Module):
    layer: type[nn.Module] = Layer

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.blocks = nn.ModuleList(self.layer() for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def model_of(layer: type[nn.Module]) -> Any:
    return type("Model", (Decoder,), {"layer": layer})()


def tokens(length: int, rows: int = 2) -> Tensor:
    """int64 [rows, length]."""
    return torch.randint(0, 16, (rows, length), generator=torch.Generator().manual_seed(length))
