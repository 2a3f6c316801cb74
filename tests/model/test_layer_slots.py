"""Slots in which layers take turns hold what they say, also after a copy that was interrupted."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from megacompile.streaming.layer_slots import LayerSlots, layer_weights


def test_a_layer_whose_copy_was_interrupted_is_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    for number, layer in enumerate(model):
        nn.init.constant_(layer.weight, float(number))
    slots = LayerSlots(layer_weights(model, [str(number) for number in range(4)], []), torch.device("cpu"))
    views = slots.views(model)
    slots.fetch(0)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(slots, "_copy_pieces", interrupted)
        with pytest.raises(KeyboardInterrupt):
            slots.fetch(2)
    slots.fetch(2)
    assert (views[id(model[2].weight)] == 2.0).all()
