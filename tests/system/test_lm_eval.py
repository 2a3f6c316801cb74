"""EleutherAI's lm_eval measures a streamed model through its own class for Hugging Face models."""
from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import tiny_tokenizer
from tiny_models import build

import megacompile

pytest.importorskip("lm_eval", reason="lm_eval is not installed")
ASKED = [("one two", " three"), ("a", " much longer continuation of it"), ("", "x")]


def measured(model: Any, tokenizer: Any) -> list[Any]:
    """Log-likelihoods of continuations and of a text, and generated texts."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        judge = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, max_length=128, device="cpu")
    until = {"until": ["zzz"], "max_gen_toks": 5}
    return [*(number for number, _ in judge.loglikelihood(
        [Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(ASKED)], disable_tqdm=True)),
        *judge.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("a text to roll over",), 0)], disable_tqdm=True),
        *judge.generate_until([Instance("generate_until", {}, (text or "q", until), n)
                               for n, (text, _) in enumerate(ASKED)], disable_tqdm=True)]


def test_streamed_or_on_the_device_it_finds_what_it_finds_unstreamed() -> None:
    tokenizer = tiny_tokenizer.build()
    plain = build(vocab_size=len(tokenizer), max_position_embeddings=256).eval()
    expected = measured(plain, tokenizer)
    model = megacompile.stream(copy.deepcopy(plain), device="cpu")
    with model.megacompile.on_device() as native:
        there = measured(native, tokenizer)
    for found in (there, measured(model, tokenizer)):
        assert found[:4] == pytest.approx(expected[:4], rel=1e-5) and found[4:] == expected[4:]
    model.megacompile.close()
