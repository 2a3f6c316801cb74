"""On CUDA, compiled: chunks of tokens give the same training in less memory, and the estimate holds what they take."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import megacompile
from megacompile.planning.memory_budget import MARGIN_BYTES

pytestmark = pytest.mark.gpu
LENGTH = 20000  # no multiple of a chunk


def build(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=512, hidden_size=512, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=8,
                         num_key_value_heads=2, max_position_embeddings=1 << 15)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(dtype)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 512, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    return dict(input_ids=ids, labels=ids)


def gradients(**options: Any) -> tuple[dict[str, torch.Tensor], int, int]:
    """Gradients of one step, the device's peak in bytes, and its estimate."""
    model = megacompile.stream(build(torch.bfloat16), device="cuda", compile=True, **options)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        model(**batch()).loss.backward()
        estimate = model.megacompile.compiled().estimate.total
        return {n: p.grad.float().clone() for n, p in model.named_parameters()}, torch.cuda.max_memory_allocated(), estimate
    finally:
        model.megacompile.close()


def exact() -> dict[str, torch.Tensor]:
    """Those of the same weights in float32."""
    model = build(torch.float32).cuda()
    model(**{name: value.cuda() for name, value in batch().items()}).loss.backward()
    return {n: p.grad.cpu() for n, p in model.named_parameters()}


@pytest.mark.parametrize("kept", [dict(saved_layers=0), dict(saved_layers=2, residuals="attention")], ids=str)
def test_chunks_on_the_device_are_the_same_training_in_less_memory(kept: dict[str, Any]) -> None:
    """Not the same bits, since attention's backward adds in no fixed order: no further from float32 than all at once. Errors
    are shares of the largest gradient of a parameter's kind of shape: a key's bias has none but what rounding leaves."""
    whole, whole_peak, whole_estimate = gradients(token_chunk=0, **kept)
    chunked, peak, estimate = gradients(token_chunk=4096, **kept)
    true = exact()
    for name, gradient in true.items():
        scale = max(other.norm() for other in true.values() if other.dim() == gradient.dim())
        error, other = ((found[name] - gradient).norm() / scale for found in (chunked, whole))
        assert error <= 1.25 * other + 2e-3, name
    assert peak < 0.7 * whole_peak
    assert peak <= estimate + MARGIN_BYTES and whole_peak <= whole_estimate + MARGIN_BYTES
