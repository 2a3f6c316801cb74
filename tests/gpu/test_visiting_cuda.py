"""On CUDA: tiles that visit the device, in several chunks, or that it holds, have the bits of updates on the host."""
from __future__ import annotations

import random
from typing import Any

import engine
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import megacompile
from megacompile.errors import NonFiniteError
from megacompile.ir import program
from megacompile.runtime.operations import OPERATIONS
from megacompile.runtime.optimizer.state_format import FORMATS
from megacompile.streaming.optimizer.hyper_parameters import MASTERS

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "VISITING_BYTES", 100_000)


def streamed(dtype: torch.dtype, **options: Any) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2)
    return megacompile.stream(AutoModelForCausalLM.from_config(config, dtype=dtype), device="cuda", compile=False,
                              micro_batch_size=2, **{"visiting_state": (), "resident_state": (), "held_state": (), **options})


def late(model: Any) -> None:
    """Lanes late by up to 4 ms, at random."""
    draw = random.Random(0)
    engine.delay(model, lambda lane: engine.backend(model).delay(lane, draw.random() * 0.004 * (draw.random() < 0.3)))


def step(model: Any, optimizer: Any, seed: int) -> None:
    ids = torch.randint(0, 512, (4, 64), generator=torch.Generator().manual_seed(seed))
    model.megacompile.train_step(dict(input_ids=ids, labels=ids), optimizer)


def state_of(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    moments = {f"{i} {key}": torch.as_tensor(value).clone() for i, of in optimizer.state_dict()["state"].items()
               for key, value in of.items()}
    return {**{name: t.clone() for name, t in model.state_dict().items()}, **moments}


#: How the optimizer keeps its state of weights of a dtype.
KEPT: tuple[tuple[torch.dtype, dict[str, str]], ...] = (
    *((torch.bfloat16, {"state_dtype": stored, "master": master}) for stored in FORMATS for master in MASTERS),
    *((torch.float32, {"state_dtype": stored}) for stored in FORMATS))


@pytest.mark.parametrize(("dtype", "kept"), KEPT, ids=str)
@pytest.mark.parametrize("options", [
    {"visiting_state": "all"}, {"visiting_state": ("prologue", "model.layers.1"), "resident_state": ("model.layers.0",)},
    {"visiting_state": "all", "pinned_memory": "2MiB"}, {"held_state": "all"},
    {"held_state": ("prologue", "model.layers.1"), "resident_state": ("model.layers.0",), "waves": 2}], ids=str)
def test_visiting_and_held_tiles_get_the_bits_of_updates_on_the_host(
        options: dict[str, Any], dtype: torch.dtype, kept: dict[str, str]) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    found = []
    for each in ({}, options):
        model = streamed(dtype, **each)
        late(model)
        optimizer = megacompile.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0, **kept)
        for seed in range(5):
            step(model, optimizer, seed)
        found.append(state_of(model, optimizer))
        model.megacompile.close()
    torch.use_deterministic_algorithms(False)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_gradient_that_is_not_finite_leaves_tiles_that_visit_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = streamed(torch.bfloat16, visiting_state="all")
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    step(model, optimizer, 0)
    before, reduce = state_of(model, optimizer), OPERATIONS["reduce"]

    def spoilt(frame: Any, node: Any) -> Any:
        gradients = reduce(frame, node)
        gradients.norms[0] = float("nan")
        return gradients

    def step_to_its_end(seed: int) -> None:
        step(model, optimizer, seed)
        model.megacompile.synchronize()

    monkeypatch.setitem(OPERATIONS, "reduce", spoilt)
    with pytest.raises(NonFiniteError, match="nothing was updated"):
        step_to_its_end(1)
    monkeypatch.setitem(OPERATIONS, "reduce", reduce)
    after = state_of(model, optimizer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    step(model, optimizer, 2)
    assert any(not torch.equal(before[name], value) for name, value in state_of(model, optimizer).items())
    model.megacompile.close()
