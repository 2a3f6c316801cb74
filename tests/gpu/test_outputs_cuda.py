"""Outputs that the caller differentiates, and out of memory in the middle of a step, on CUDA against native float32."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import assert_same_gradients
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

import megacompile
from megacompile.errors import DeviceMemoryError
from megacompile.losses import log_probabilities, next_tokens

pytestmark = pytest.mark.gpu


def build() -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2)
    return AutoModelForCausalLM.from_config(config).train()


def of_logits(model: Any, batch: dict[str, Tensor], targets: Tensor) -> Tensor:
    return log_probabilities(model(**batch, use_cache=False).logits.flatten(0, 1), targets.flatten()).view(targets.shape)


def of_tokens(model: Any, batch: dict[str, Tensor], targets: Tensor) -> Tensor:
    values: Tensor = model.megacompile.per_token(log_probabilities, batch, targets=targets)
    return values


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("values_of", [of_logits, of_tokens])
def test_what_the_caller_differentiates_is_native_pytorchs(values_of: Callable[..., Tensor], padded: bool) -> None:
    native = build()
    model = megacompile.stream(copy.deepcopy(native), micro_batch_size=2, checkpoint_interval=2)
    native.cuda()
    ids = torch.randint(0, 512, (3, 40)).cuda()
    batch = {"input_ids": ids}
    if padded:
        batch["attention_mask"] = (torch.arange(40) >= torch.tensor([[0], [9], [30]])).long().cuda()
    targets = next_tokens(ids)
    for own, values in ((native, of_logits), (model, values_of)):
        (values(own, batch, targets)[:, -9:-1].sum(1) * 0.1).exp().sum().backward()
    assert_same_gradients(model, native, 1e-3)  # float32 products by TensorFloat32
    model.megacompile.close()


def test_out_of_memory_in_mid_step_changes_nothing_and_a_smaller_batch_runs() -> None:
    model = megacompile.stream(build(), micro_batch_size=4)
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 512, (4, 512))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.megacompile.synchronize()
    torch.cuda.empty_cache()
    large = torch.randint(0, 512, (4, 8192))
    # Less than is planned with. It limits this process alone: other tests may run on the device.
    few = torch.cuda.memory_reserved() + (80 << 20)
    torch.cuda.set_per_process_memory_fraction(few / torch.cuda.get_device_properties().total_memory)
    try:
        with pytest.raises(DeviceMemoryError, match="no weight has changed"):
            model(input_ids=large, labels=large).loss.backward()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    model.megacompile.close()
