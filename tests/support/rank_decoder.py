"""A model that is captured quickly."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 64


class Decoder(nn.Module):
    """With a frozen parameter, one that is not read, tied weights, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.layers = nn.ModuleList(nn.Sequential(nn.RMSNorm(16), nn.Linear(16, 16), nn.SiLU()) for _ in range(3))
        self.layers[0][0].weight.requires_grad_(False)
        self.unread = nn.Parameter(torch.zeros(3))
        self.register_buffer("scale", torch.ones(16))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(input_ids) * self.scale
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())


def decoder(bf16: bool = False) -> Any:
    torch.manual_seed(0)
    return Decoder().bfloat16() if bf16 else Decoder()
