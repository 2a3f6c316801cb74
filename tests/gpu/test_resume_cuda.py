"""On CUDA, a run that saves during training and updates tiles on the device resumes bit-exactly."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import megacompile
from megacompile.runtime.optimizer.state_format import FORMATS
from megacompile.streaming.optimizer.hyper_parameters import MASTERS

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def streamed(**options: Any) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
                         num_key_value_heads=2)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return megacompile.stream(model, device="cuda", compile=False, micro_batch_size=2, **options)


def steps(model: Any, optimizer: Any, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        ids = torch.randint(0, 512, (4, 128), device="cuda").cpu()  # from the device's generator
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kept", [{"state_dtype": stored, "master": master} for stored in FORMATS for master in MASTERS],
                         ids=lambda kept: f"{kept['state_dtype']}, {kept['master']} master")
@pytest.mark.parametrize("copy_memory", ["1GiB", 0])
@pytest.mark.parametrize("overlap", [None, "backward"])
@pytest.mark.parametrize("state", [(), ("model.layers.1", "model.layers.2")], ids=["", "updated on the device"])
def test_a_run_resumes_to_the_bit_under_its_own_and_another_plan(
        overlap: str | None, copy_memory: Any, state: tuple[str, ...], kept: dict[str, str], tmp_path: Path) -> None:
    options = {**kept, "lr": 1e-3, "overlap": overlap, "max_grad_norm": None if overlap else 1.0}
    model = streamed(resident=state, resident_state=state)
    optimizer = megacompile.AdamW(model.parameters(), **options)
    steps(model, optimizer, 5)
    with megacompile.CheckpointWriter(tmp_path, model, optimizer, copy_memory=copy_memory) as writer:
        writer.save()
        expected = steps(model, optimizer, 5), [optimizer.master(p) for p in model.parameters()]
    model.megacompile.close()
    for plan in ({"resident": state, "resident_state": state}, {"checkpoint_interval": 2}):
        model = streamed(**plan)
        optimizer = megacompile.AdamW(model.parameters(), **options)
        megacompile.load_checkpoint(tmp_path, model, optimizer)
        assert steps(model, optimizer, 5) == expected[0]
        assert all(map(torch.equal, [optimizer.master(p) for p in model.parameters()], expected[1]))
        model.megacompile.close()
