"""The plain model on the GPU: native's tokens, current weights, and no memory lost over switches."""
from __future__ import annotations

import pytest
import torch
from test_cuda import batch, build

import megacompile

pytestmark = pytest.mark.gpu


def test_generation_is_natives_and_switches_lose_no_memory() -> None:
    model = megacompile.stream(build(), device="cuda", compile=False)
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-3)
    prompt = batch(9)["input_ids"][:, :16].cuda()
    reserved = []
    for step in range(20):
        model.megacompile.train_step(batch(step), optimizer)
        model.megacompile.synchronize()
        found = model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
        plain = build()
        plain.load_state_dict(model.state_dict())
        assert torch.equal(found, plain.cuda().generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0))
        del plain
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_allocated())
    assert reserved[-1] <= reserved[4]
    model.megacompile.close()


def test_a_budget_that_holds_training_alone_has_it_give_way() -> None:
    model = megacompile.stream(build(), device="cuda", compile=False)
    with torch.no_grad():
        expected = model(**batch(0)).loss
        streamed = model.megacompile.streamed
        with model.megacompile.on_device() as native:
            assert next(native.parameters()).is_cuda and streamed.device_copy.bytes > 0
        assert torch.equal(model(**batch(0)).loss, expected)
    model.megacompile.close()
