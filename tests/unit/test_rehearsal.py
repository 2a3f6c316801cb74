"""Which trace would be of no use is known before it is made."""
from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from tiny_models import build
from torch import Tensor, nn

from megacompile.frontend import capture
from megacompile.frontend.layers import find_layers
from megacompile.frontend.rehearsal import rehearse

trace = importlib.import_module("megacompile.frontend.trace")


class Gate(nn.Module):
    """In the place of attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, width)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return self.gate(hidden_states).sigmoid() * hidden_states, None


class Again(nn.Module):
    """Runs its layers twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(input_ids)
        for layer in (*self.layers, *self.layers):
            x = torch.relu(layer(x))
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def gated() -> nn.Module:
    model: nn.Module = build()
    for layer in model.model.layers[:1]:  # type: ignore[union-attr,index]
        layer.self_attn = Gate(model.config.hidden_size)  # type: ignore[union-attr]
    return model


@pytest.mark.parametrize("make", [build, gated, Again])
def test_a_model_is_traced_once(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers without our attention, and layers that run again, among them."""
    traces: list[Any] = []
    made = trace.capture_model_graph
    monkeypatch.setattr(trace, "capture_model_graph", lambda *args: traces.append(args) or made(*args))
    example = {name: torch.zeros(2, 5, dtype=torch.long) for name in ("input_ids", "labels")}
    capture(make(), example=example if make is Again else None)
    assert len(traces) == 1


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2)])

    def forward(self) -> None:
        raise TimeoutError("the user's")


def test_what_says_nothing_about_the_model_goes_to_the_caller() -> None:
    model = Late()
    with pytest.raises(TimeoutError, match="the user's"):
        rehearse(model, {}, {}, find_layers(model))
