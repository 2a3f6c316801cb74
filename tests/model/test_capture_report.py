"""`explain_capture`: what was found in a model, as text."""
from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch
from test_frozen import Decoder, decoder
from torch import nn

import megacompile
from megacompile.errors import CaptureError


@pytest.mark.nightly(held_by="tests/model/test_float8.py::test_all_linear_layers_are_rewritten_and_embedding_and_head_stay")
def test_a_report_names_what_was_found_and_changes_nothing() -> None:
    model = decoder("layers.1", "head")
    model.unread = nn.Parameter(torch.zeros(2))
    before = dict(model.named_parameters())
    text = megacompile.explain_capture(model, device="cpu")
    assert all(p is before[name] and not hasattr(model, "megacompile") for name, p in model.named_parameters())
    lines = [line.split() for line in text.splitlines()]
    backward = {line[0]: line[-1] for line in lines if line and line[-1] in ("yes", "none")}
    assert text.startswith("Decoder: 3 layers in layers, ")
    assert "batch: input_ids, labels; only the loss reads labels" in text
    assert backward == {"prologue": "none", "layers.0": "none", "layers.1": "yes", "layers.2": "yes", "epilogue": "yes"}
    assert any(line[:3] == ["layers.1.bfloat16", "bfloat16", "trained"] for line in lines)
    assert any(line[:4] == ["prologue", "float32", "frozen", "4.0"] for line in lines), "four bytes a frozen parameter"
    assert "no call reads unread: left as they are" in text
    assert "frozen below: the backward ends above layers.0" in text
    assert "loss: a sum over target tokens" in text


@pytest.mark.nightly(held_by="tests/model/test_float8.py::test_all_linear_layers_are_rewritten_and_embedding_and_head_stay")
def test_ties_and_the_kernels_of_attention_are_told(model: Any) -> None:
    tied = megacompile.explain_capture(tiny_models.build(tie_word_embeddings=True), device="cpu")
    assert "tied: model.embed_tokens.weight = lm_head.weight" in tied
    assert "tile tied is read by prologue, epilogue: one gradient, one update" in tied
    assert sum(line.startswith("tied ") for line in tied.splitlines()) == 1
    assert "model.layers.0 .. 2" in megacompile.explain_capture(model), "a streamed model's own capture"


@pytest.mark.nightly(held_by="tests/model/test_surface.py::test_the_stack_of_layers_can_be_registered_for_a_class")
def test_a_class_declares_its_stack() -> None:
    @megacompile.layer_stack("small")
    class TwoStacks(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.small = self.layers
            self.layers = nn.ModuleList(nn.Linear(99, 99) for _ in range(2))

    with pytest.raises(CaptureError, match=r"layers\.0 is not called in a forward \(called: small\.0\.up, "):
        megacompile.explain_capture(_forward_of_small(TwoStacks)(), layers="layers", device="cpu")
    text = megacompile.explain_capture(_forward_of_small(TwoStacks)(), device="cpu")
    assert "3 layers in small" in text and "other lists of modules: layers (19,800 parameters)" in text


def _forward_of_small(cls: type[Decoder]) -> type[Decoder]:
    class Forward(cls):  # type: ignore[misc, valid-type]
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            x = self.embedding(input_ids)
            for layer in self.small:
                x = layer(x)
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    return Forward
