"""On CUDA: checkpoints and residuals in host memory give the same training in less device memory, and the estimate holds it."""
from __future__ import annotations

from typing import Any

import engine
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import megacompile
from megacompile.ir.program import Lane
from megacompile.planning.memory_budget import MARGIN_BYTES

pytestmark = pytest.mark.gpu
LENGTH, LAYERS = 8192, 12


def gradients(late: bool = False, **options: Any) -> tuple[dict[str, torch.Tensor], int, int]:
    """Gradients of the second step, the device's peak in bytes, and its estimate. `late`: copies come late."""
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=512, hidden_size=1024, intermediate_size=1024, num_hidden_layers=LAYERS,
                         num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=1 << 15)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = megacompile.stream(model, device="cuda", micro_batch_size=1, checkpoint_interval=1,
                               **{"compile": False, "saved_layers": 0, "host_checkpoints": False} | options)
    ids = torch.randint(0, 512, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    backend = engine.backend(model)
    if late:
        engine.delay(model, lambda lane: backend.delay(lane, 2e-4) if lane in (Lane.H2D, Lane.D2H) else None)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        for _ in range(2):
            model.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
        estimate = model.megacompile.compiled().estimate.total
        return {n: p.grad.float().clone() for n, p in model.named_parameters()}, torch.cuda.max_memory_allocated(), estimate
    finally:
        model.megacompile.close()


def assert_alike(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, gradient in expected.items():  # attention's backward adds long sequences in no fixed order
        scale = max(other.norm() for other in expected.values() if other.dim() == gradient.dim())  # a key's bias is noise
        assert (found[name] - gradient).norm() <= 1e-2 * scale, name


@pytest.mark.parametrize("late", [False, True], ids=["", "late copies"])
def test_checkpoints_on_the_host_are_the_same_training_in_less_device_memory(late: bool) -> None:
    there, peak_there, estimate_there = gradients()
    home, peak, estimate = gradients(late, host_checkpoints=True)
    assert_alike(home, there)
    saved = (LAYERS - 1 - 1) * 3 * LENGTH * 1024 * 2  # two slots take less than one checkpoint of three micro-batches
    assert peak <= peak_there - 0.9 * saved
    assert peak <= estimate + MARGIN_BYTES and peak_there <= estimate_there + MARGIN_BYTES
