"""torch.distributed.checkpoint exports and imports weights and state under the model's own names."""
from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import megacompile


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("bf16", [False, True])
def test_a_state_that_was_exported_and_imported_trains_on_with_the_same_bits(bf16: bool, tmp_path: Path) -> None:
    """It is imported into the tensors that `state_dict` returns, which are those of the tiles: remainders stay."""
    shared = tiny_models.Shared(bf16=bf16)
    model = shared.fresh()
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
    for seed in range(2):
        tiny_models.train_step(model, optimizer, seed)
    weights, state = get_state_dict(model, optimizer)
    assert state["state"].keys() == dict(model.named_parameters()).keys()
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    tiny_models.train_step(model, optimizer, 2)
    expected = tiny_models.state_of(model, optimizer)
    model = shared.fresh()
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    tiny_models.train_step(model, optimizer, 2)
    assert tiny_models.same_bits(tiny_models.state_of(model, optimizer), expected)
    assert torch.isfinite(torch.tensor(optimizer.grad_norm))
    shared.close()
