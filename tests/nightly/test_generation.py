"""Families generate what they generate unstreamed: greedily, and by seeded sampling, with padding on the left."""
from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from tiny_configs import FIRST_PLAIN_TOKEN, VOCABULARY, tiny_config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import megacompile
from megacompile.streaming.device_copy import Arrangement, Turns
from megacompile.streaming.generation import ways
from megacompile.streaming.generation.ways import Way, cache_bytes, ways_to_generate, working_bytes

#: The second has layers of several widths, which its config has by layer.
FAMILIES = ("gemma3_text", "gemma4_text", "mixtral", "gpt_neox", "mamba2", "phi3", "qwen3_next", "olmo2", "gpt2", "falcon",
            "cohere2")


def generated(model: Any, **how: Any) -> Tensor:
    ids = torch.randint(FIRST_PLAIN_TOKEN, VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1] * 7, [0] * 2 + [1] * 5, [0] * 4 + [1] * 3])
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers on padding and sampling
        return model.generate(input_ids=ids * mask, attention_mask=mask, max_new_tokens=6, pad_token_id=0, eos_token_id=None,
                              **how)


@pytest.mark.parametrize("in_turns", [False, True], ids=["whole", "in turns"])
@pytest.mark.parametrize("family", [*FAMILIES[:2], *(pytest.param(each, marks=pytest.mark.nightly) for each in FAMILIES[2:])])
def test_a_family_generates_what_it_generates_unstreamed(
        family: str, in_turns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if in_turns:  # as on a device that holds two layers
        monkeypatch.setattr("megacompile.streaming.streamed_module.ways_to_generate",
                            lambda model, given, arrange: iter([Way(Turns.ALL, 0, given)]))
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(tiny_config(family)).float().eval()
    model = megacompile.stream(copy.deepcopy(plain), device="cpu")
    for how in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8}):
        assert torch.equal(generated(model, **how), generated(plain, **how))
    assert (model.megacompile.device_copy.turns is not None) == in_turns
    model.megacompile.close()


@pytest.mark.parametrize("family", ["gemma3_text", "minimax", *(
    pytest.param(each, marks=pytest.mark.nightly) for each in FAMILIES if each != "gemma3_text")])
def test_prompts_are_computed_in_chunks_where_they_do_not_fit_at_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same tokens; or at once, where the family has no cache that a chunk could continue."""
    chosen = []

    def two_tokens_fit(model: Any, given: Any, arrange: Any) -> Any:
        less = working_bytes(model, {**given, "prefill_chunk_size": 3})
        cached = cache_bytes(model, given)
        found = [*ways_to_generate(model, given, lambda more, turns: Arrangement(0, 0)
                                   if turns == Turns.NONE and more < cached + less else None)]
        chosen.extend(way.arguments["prefill_chunk_size"] for way in found)
        return iter(found or [Way(Turns.NONE, 0, dict(given))])

    monkeypatch.setattr("megacompile.streaming.streamed_module.ways_to_generate", two_tokens_fit)
    monkeypatch.setattr(ways, "LEAST_CHUNK", 1)
    monkeypatch.setattr(ways, "part_counts", lambda *_: [1])
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(tiny_config(family)).float().eval()
    model = megacompile.stream(copy.deepcopy(plain), device="cpu")
    for how in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8}, {"num_beams": 2, "do_sample": False}):
        assert torch.equal(generated(model, use_cache=True, **how), generated(plain, use_cache=True, **how))
    assert chosen == ([] if family in ("minimax", "mamba2") else [2, 2, 2])
    model.megacompile.close()


@pytest.mark.parametrize("family", ["gemma4_text", "qwen3"])
def test_the_bytes_of_keys_and_values_are_those_of_each_layer_s_own_sizes(family: str) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(family)).float().eval()
    ids = torch.randint(FIRST_PLAIN_TOKEN, VOCABULARY, (3, 7))
    layers = model(input_ids=ids, use_cache=True).past_key_values.layers
    held = sum(tensor.numel() * tensor.element_size() for layer in layers for tensor in (layer.keys, layer.values))
    assert cache_bytes(model, {"input_ids": ids, "max_new_tokens": 0}) == held


def test_the_widest_layer_says_how_much_a_chunk_of_the_prompts_takes() -> None:
    def bytes_of(wide: int, by_layer: dict[int, Any] | None = None) -> int:
        config = tiny_config("llama")
        config.intermediate_size, config.per_layer_config = wide, by_layer
        model = nn.Linear(1, 1)  # transformers builds a Llama of such a config only with code of its own
        model.config = config
        return working_bytes(model, {"input_ids": torch.ones(3, 7, dtype=torch.long)})

    assert bytes_of(48) < bytes_of(48, {1: {"intermediate_size": 96}}) == bytes_of(96)
