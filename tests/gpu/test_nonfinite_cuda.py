"""Non-finite gradients with updates on arrival, for tiles that are updated on the device (CUDA)."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import megacompile
from megacompile.errors import NonFiniteError
from megacompile.runtime.operations import OPERATIONS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tile_updated_on_the_device_keeps_weights_and_moments(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2)
    model: Any = megacompile.stream(AutoModelForCausalLM.from_config(config, dtype=dtype), device="cuda", compile=False,
                                    resident_state=("prologue", "model.layers.0"))
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, overlap="backward")
    reduce = OPERATIONS["reduce"]

    def spoilt(frame: Any, node: Any) -> Any:
        gradients = reduce(frame, node)
        if node.kwargs["tile"] == "model.layers.0":
            gradients.norms[1] = float("nan")
        return gradients

    def step() -> None:
        ids = torch.randint(0, 512, (2, 64))
        model.megacompile.train_step(dict(input_ids=ids, labels=ids), optimizer)
        model.megacompile.synchronize()

    def state() -> dict[str, torch.Tensor]:
        moments = {f"{name} {key}": value.clone() for name, p in model.named_parameters()
                   for key, value in optimizer.state[p].items() if isinstance(value, torch.Tensor)}
        return {**{name: p.detach().clone() for name, p in model.named_parameters()}, **moments}

    step()
    before = state()
    monkeypatch.setitem(OPERATIONS, "reduce", spoilt)
    with pytest.raises(NonFiniteError, match="1 of 5 tiles kept weights and moments"):
        step()
    monkeypatch.setitem(OPERATIONS, "reduce", reduce)
    model.megacompile.synchronize()  # the rest of the state comes home
    after = state()
    kept = {name for name in before if torch.equal(before[name], after[name])}
    assert kept == {name for name in before if name.startswith("model.layers.0.")}
    step()
    assert all(torch.isfinite(value.float()).all() for value in state().values())
    model.megacompile.close()
