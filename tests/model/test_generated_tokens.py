"""Mixtures, hybrids and recurrent models generate what they generate unstreamed, in each way, and what they keep is counted."""
from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mixtures import models_in_module
from tiny_configs import FIRST_PLAIN_TOKEN, VOCABULARY, tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

import megacompile
from megacompile.streaming.device_copy import DeviceCopy, Turns
from megacompile.streaming.generation import ways
from megacompile.streaming.generation.ways import Way, cache_bytes, can_offload_cache, layer_caches

#: With recurrent layers, experts and a shared expert.
FAST = ("qwen3_next",)
MIXTURES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe", "mixtral", "qwen2_moe", "minimax_m2", "granitemoe",
            "gemma4_text")
HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "nemotron_h", "granitemoehybrid", "bamba", "falcon_h1", "zamba2",
           "jamba", "zamba", "lfm2", "lfm2_moe", "kimi_linear", "bailing_hybrid", "minimax", "zaya", "mamba", "mamba2",
           "falcon_mamba", "recurrent_gemma")
#: Recurrent families that begin each chunk of a prompt at a state of zeros, or have no cache that a chunk could continue.
AT_ONCE = ("jamba", "zamba", "minimax", "mamba", "mamba2", "falcon_mamba", "recurrent_gemma")
#: The first generates with all weights there. In the third, each second layer takes turns.
WAYS: dict[str, dict[str, Any]] = {
    "whole": {}, "in turns": {"turns": Turns.ALL}, "some in turns": {"turns": Turns.SOME}, "in parts": {"parts": 2},
    "in turns and parts": {"turns": Turns.ALL, "parts": 3}}


family, plain, streamed = models_in_module(
    [*FAST, *(pytest.param(each, marks=pytest.mark.nightly) for each in MIXTURES + HYBRIDS)])


def prompts() -> dict[str, Tensor]:
    ids = torch.randint(FIRST_PLAIN_TOKEN, VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1] * 7, [0] * 2 + [1] * 5, [0] * 4 + [1] * 3])
    return {"input_ids": ids * mask, "attention_mask": mask}


def generated(model: Any, **how: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers on padding
        return model.generate(**prompts(), max_new_tokens=6, pad_token_id=0, eos_token_id=None, do_sample=False, use_cache=True,
                              **how)


def check(model: Any, plain: Any) -> None:
    for beams in (1, 2):
        assert torch.equal(generated(model, num_beams=beams), generated(plain, num_beams=beams))


def force(patch: pytest.MonkeyPatch, turns: Turns = Turns.NONE, parts: int = 1, **options: Any) -> None:
    if turns == Turns.SOME:
        layers = DeviceCopy.layers
        patch.setattr(DeviceCopy, "layers", lambda self: layers(self)[1::2])
        turns = Turns.ALL  # of these
    patch.setattr("megacompile.streaming.streamed_module.ways_to_generate",
                  lambda model, given, arrange: iter([Way(turns, 0, {**given, **options}, parts)]))


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_the_plain_model(way: str, plain: Any, streamed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    streamed.megacompile.device_copy.release()
    force(monkeypatch, **WAYS[way])
    check(streamed, plain)
    assert (streamed.megacompile.device_copy.turns is not None) == ("turns" in WAYS[way])


def test_tokens_follow_training(plain: Any, streamed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = megacompile.AdamW(streamed.parameters(), lr=0.05)
    batch = {name: prompts()["input_ids"].clamp_min(FIRST_PLAIN_TOKEN) for name in ("input_ids", "labels")}
    for way in ("whole", "in turns", "whole"):
        force(monkeypatch, **WAYS[way])
        generated(streamed)  # makes the copy, whose weights the step changes
        streamed.train()
        streamed.megacompile.train_step(batch, optimizer)
        streamed.eval()
        check(streamed, copy.deepcopy(streamed))
        streamed.megacompile.device_copy.release()
    assert not torch.equal(generated(streamed), generated(plain))
    streamed.load_state_dict(plain.state_dict())


def test_prompts_in_chunks_have_the_same_tokens_or_are_computed_at_once(
        family: str, plain: Any, streamed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "LEAST_CHUNK", 1)
    chunks = [each["prefill_chunk_size"] for each in ways._prefills(streamed, {**prompts(), "use_cache": True}) if each]
    assert chunks == ([] if family in AT_ONCE else [4, 2, 1])
    for chunk in chunks[:2]:
        force(monkeypatch, prefill_chunk_size=chunk)
        check(streamed, plain)


def test_what_layers_keep_is_counted(plain: Any, streamed: Any) -> None:
    """For longer sequences than windows are."""
    ids = torch.randint(FIRST_PLAIN_TOKEN, VOCABULARY, (3, 40))
    with torch.no_grad():
        out = plain(input_ids=ids, use_cache=True)
    cache = out.get("past_key_values", out.get("cache_params"))
    if cache is None:
        pytest.skip("its modules keep the state themselves")
    held = sum(each.nbytes for each in tensors_of([*map(vars, cache.layers), getattr(cache, "linear_cache", [])]))
    counted = cache_bytes(streamed, {"input_ids": ids, "max_new_tokens": 0})
    assert held <= 1.1 * counted and counted <= 1.1 * held
    assert cache_bytes(streamed, {"input_ids": ids, "max_new_tokens": 0}, offloaded=True) <= counted


def test_options_of_latent_attention_are_read_by_layer() -> None:
    """The config of such a family has none for the whole model."""
    config = tiny_config("dots3_note_text")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    kept = [each.kv_lora_rank + each.qk_rope_head_dim + each.index_head_dim for each in config.per_layer_config]
    assert [each.token for each in layer_caches(model)] == [4 * width for width in kept]


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(each)
    elif isinstance(value, Tensor) and value.dim() > 0:
        yield value


def test_a_cache_is_offloaded_where_no_layer_has_both_keys_and_a_recurrent_state() -> None:
    for family in FAST + MIXTURES + HYBRIDS:
        config = tiny_config(family)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        both = any(isinstance(layer, CacheLayerMixin) and isinstance(layer, LinearAttentionCacheLayerMixin)
                   for layer in DynamicCache(config=config).layers)
        assert can_offload_cache(model) == (not both and family != "minimax"), family  # whose cache is its own
