"""Small decoders of several lists of layers, and of layers that run more than once."""
from __future__ import annotations

from typing import Any

import torch
from models import HandWritten, HandWrittenLayer
from torch import Tensor, nn


class Untied(HandWritten):
    def __init__(self, depth: int = 2) -> None:
        super().__init__(depth=depth, tied=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(self.norm(self.through(self.embed(input_ids)))), labels)

    def through(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class UShaped(Untied):
    """Each layer of the second half adds what its partner in the first half has made."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.ModuleList(HandWrittenLayer(32, False) for _ in range(3)), self.blocks
        self.up.append(HandWrittenLayer(32, True))
        self.gates = nn.Parameter(torch.linspace(0.5, 1, 3))
        del self.blocks

    def through(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
        for gate, layer in zip(self.gates, self.up, strict=True):
            x = layer(x + gate * kept.pop())
        return x


class Mixer(nn.Module):
    """Mixes in what an encoder has made."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = HandWrittenLayer(32, False), nn.Linear(32, 32)

    def forward(self, x: Tensor, encoded: Tensor) -> Tensor:
        return self.own(x) + torch.tanh(self.other(encoded))


class Part(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(layers), nn.LayerNorm(32)


class EncoderDecoder(Untied):
    """The encoder's output feeds every layer of the decoder, which begins with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Part(HandWrittenLayer(32, False), HandWrittenLayer(32, False))
        self.decoder = Part(Mixer(), Mixer(), Mixer())
        del self.blocks

    def through(self, x: Tensor) -> Tensor:
        encoded = x
        for layer in self.encoder.layers:
            encoded = layer(encoded)
        encoded = self.encoder.norm(encoded)
        for layer in self.decoder.layers:
            x = layer(x, encoded)
        return self.decoder.norm(x)


class Interleaved(Untied):
    """A layer of one list, a layer of the other, and one beside both at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)) for _ in range(2))
        self.last = HandWrittenLayer(32, False)

    def through(self, x: Tensor) -> Tensor:
        for block, linear in zip(self.blocks, self.linear, strict=True):
            x = x + linear(block(x))
        return self.last(x)


class Looped(Untied):
    """Layers that run three times, the embedding added each time; two of them share a matrix, and the scale between runs is one."""

    def __init__(self) -> None:
        super().__init__(depth=3)
        self.blocks[2].out = self.blocks[0].out
        self.scale = nn.Parameter(torch.full((32,), 0.9))

    def through(self, x: Tensor) -> Tensor:
        embedded = x
        for _ in range(3):
            for block in self.blocks:
                x = block(x)
            x = x * self.scale + embedded
        return x


class OneLayer(Untied):
    """One layer, which is every item of the list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[1]] * 4)

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Recurrent(Untied):
    """A shared block after every second layer, whose own norm is another each time."""

    def __init__(self) -> None:
        super().__init__(depth=3)
        self.shared = HandWrittenLayer(32, True)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(3))

    def through(self, x: Tensor) -> Tensor:
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = x + self.shared(norm(block(x)))
        return x


def built(model_class: type[nn.Module]) -> Any:
    """With every parameter off its initial value."""
    torch.manual_seed(0)
    model = model_class()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model
