"""The plain model on the GPU: native's tokens, current weights, and no memory lost over switches."""
from __future__ import annotations

import device_copies
import mixtures
import pytest
import torch
from test_cuda import batch, build

import megacompile
from megacompile.runtime.backends.cuda import CudaBackend
from megacompile.streaming.device_copy import Turns, original_class
from megacompile.streaming.generation import turns as generation_turns
from megacompile.trainers.sent_weights import sent_weights

pytestmark = pytest.mark.gpu


def test_generation_is_natives_and_switches_lose_no_memory() -> None:
    model = megacompile.stream(build(), device="cuda", compile=False)
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-3)
    prompt = batch(9)["input_ids"][:, :16].cuda()
    reserved = []
    for step in range(20):
        model.megacompile.train_step(batch(step), optimizer)
        model.megacompile.synchronize()
        found = model.generate(prompt if step % 2 else prompt.cpu(), max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert found.is_cuda
        plain = build()
        plain.load_state_dict(model.state_dict())
        assert torch.equal(found, plain.cuda().generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0))
        del plain
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_allocated())
    assert reserved[-1] <= reserved[4]
    model.megacompile.close()


def test_generation_beside_the_update_has_the_logits_of_the_whole_update() -> None:
    found = []
    prompt = batch(9)["input_ids"][:, :16].cuda()
    for early in (True, False):
        model = megacompile.stream(build(layers=8), device="cuda", compile=False)
        optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
        for step in range(6):
            model(**batch(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if not early:
                model.megacompile.synchronize()
            given = {"cache_implementation": "static"} if step > 3 else {}
            found.append(torch.stack(model.generate(
                prompt, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None, output_logits=True,
                return_dict_in_generate=True, **given).logits))
        model.megacompile.close()
    assert all(map(torch.equal, found[:6], found[6:]))


@pytest.mark.parametrize("turns", [Turns.SOME, Turns.ALL])
def test_layers_that_take_turns_generate_natives_tokens_after_every_step(turns: Turns) -> None:
    """With slow copies a layer would compute with the weights of another one."""
    model = megacompile.stream(build(layers=7), device="cuda", compile=False)
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-3)
    prompt = batch(9)["input_ids"][:, :16].cuda()
    more = device_copies.bytes_beside(model, 2)
    for step in range(5):
        model.megacompile.train_step(batch(step), optimizer)
        model.megacompile.synchronize()
        with torch.no_grad(), model.megacompile.device_copy.use(original_class(model), more, turns) as native:
            assert device_copies.turning(model) == (5 if turns == Turns.SOME else 7)
            found = native.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
            if turns == Turns.ALL:  # `generate` offloads the cache only then; transformers 5.17 loses races between its copies
                offloaded = native.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0,
                                            cache_implementation="offloaded")
                assert torch.equal(found, offloaded)
        plain = build(layers=7)
        plain.load_state_dict(model.state_dict())
        assert torch.equal(found, plain.cuda().generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0))
    model.megacompile.close()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_mixture_copies_the_experts_that_it_chooses_with_the_logits_of_whole_copies(
        rows: int, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = mixtures.Copies(monkeypatch, CudaBackend)
    model = megacompile.stream(mixtures.build(family, torch.bfloat16), device="cuda", compile=False)
    with mixtures.in_turns(model) as native:
        tokens, logits = mixtures.generated(native, rows, do_sample=False)
    assert copies.routed()
    model.megacompile.device_copy.release()
    monkeypatch.setattr(generation_turns, "most_tokens", lambda layers: 0)
    with mixtures.in_turns(model) as native:
        whole = mixtures.generated(native, rows, do_sample=False)
    assert torch.equal(tokens, whole[0]) and torch.equal(logits, whole[1])
    model.megacompile.close()


def test_a_budget_that_holds_training_alone_has_it_give_way() -> None:
    model = megacompile.stream(build(), device="cuda", compile=False)
    with torch.no_grad():
        expected = model(**batch(0)).loss
        with model.megacompile.on_device() as native:
            assert next(native.parameters()).is_cuda and model.megacompile.device_copy.bytes > 0
        assert torch.equal(model(**batch(0)).loss, expected)
    model.megacompile.close()


def test_weights_that_are_sent_are_current_and_on_the_device_one_at_a_time() -> None:
    model = megacompile.stream(build(), device="cuda", compile=False)
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-3)
    model.megacompile.train_step(batch(0), optimizer)
    before, most, sent = torch.cuda.memory_allocated(), 0, {}
    for name, weight in sent_weights(model, torch.device("cuda")):
        assert weight.is_cuda
        most = max(most, torch.cuda.memory_allocated() - before)
        sent[name] = weight.cpu()
    parameters = dict(model.named_parameters())
    assert most <= 3 * max(p.nbytes for p in parameters.values()) < sum(p.nbytes for p in parameters.values())
    assert sent.keys() == parameters.keys() and all(torch.equal(sent[name], p) for name, p in parameters.items())
    model.megacompile.close()
