"""Rows that begin with the same prompt: it is computed once, and the tokens are those of a computation for each row."""
from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from torch import Tensor

import megacompile
from megacompile.streaming.generation import ways
from megacompile.streaming.generation.shared_prompts import equal_rows

TOKENS, NEW = 9, 5


@pytest.fixture(scope="module")
def models() -> Iterator[tuple[Any, Any]]:
    streamed = megacompile.stream(tiny_models.build(), device="cpu")
    yield tiny_models.build().eval(), streamed.eval()
    streamed.megacompile.close()


def prompts(rows: int, equal: int) -> dict[str, Tensor]:
    """`rows` prompts of unequal lengths, padded on the left, each of them `equal` times."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(1, tiny_models.VOCABULARY, (rows, TOKENS), generator=generator)
    mask = torch.stack([(torch.arange(TOKENS) >= row).long() for row in range(rows)])
    return {"input_ids": (ids * mask).repeat_interleave(equal, 0), "attention_mask": mask.repeat_interleave(equal, 0)}


def generated(model: Any, **given: Any) -> Tensor:
    torch.manual_seed(1)
    return model.generate(**{"max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False, **given})


class Computed:
    """The tokens that a module's calls have computed so far."""

    def __init__(self, model: Any) -> None:
        self.tokens = 0
        self._hook = model.model.embed_tokens.register_forward_pre_hook(self._count)

    def _count(self, _: Any, args: tuple[Tensor, ...]) -> None:
        self.tokens += args[0].numel()

    def taken(self) -> int:
        self._hook.remove()
        return self.tokens


SAMPLED = dict(do_sample=True, temperature=1.5, top_k=20)
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "equal rows": (3, 4, {}), "one prompt": (1, 6, {}), "sequences": (3, 1, dict(num_return_sequences=4, **SAMPLED)),
    "equal rows and sequences": (2, 2, dict(num_return_sequences=3, **SAMPLED)),
    "an end token": (3, 4, dict(eos_token_id=[7, 9])),
    "more tokens than that": (2, 3, dict(min_new_tokens=4, repetition_penalty=1.3, **SAMPLED)),
    "a configuration": (2, 4, dict(generation_config=transformers.GenerationConfig(
        max_new_tokens=NEW, pad_token_id=0, num_return_sequences=2, min_new_tokens=NEW, eos_token_id=3, **SAMPLED))),
    "arguments beside a configuration": (2, 4, dict(max_new_tokens=NEW, num_return_sequences=2, generation_config=(
        transformers.GenerationConfig(max_new_tokens=2, pad_token_id=0, num_return_sequences=3, **SAMPLED)))),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_natives_and_each_prompt_is_computed_once(case: str, models: tuple[Any, Any]) -> None:
    plain, streamed = models
    rows, equal, options = CASES[case]
    call = generated if "generation_config" not in options else lambda model, **given: model.generate(**given)
    found = []
    for model in (plain, streamed):
        torch.manual_seed(1)
        counted = Computed(model)
        found.append((call(model, **prompts(rows, equal), **options), counted.taken()))
    (expected, all_tokens), (tokens, computed) = found
    assert torch.equal(tokens, expected)
    sequences = equal * (2 if "generation_config" in options else options.get("num_return_sequences", 1))
    assert all_tokens - computed == rows * (sequences - 1) * (TOKENS - 1)


def test_several_greedy_sequences_are_refused_as_by_transformers(models: tuple[Any, Any]) -> None:
    for model in models:
        with pytest.raises(ValueError, match="Greedy"):
            generated(model, **prompts(2, 1), num_return_sequences=2)


@pytest.mark.parametrize("options", [
    dict(num_beams=2), dict(use_cache=False), dict(cache_implementation="static"), dict(return_dict_in_generate=True),
    dict(max_new_tokens=None, max_length=TOKENS + NEW)], ids=str)
def test_prompts_are_computed_for_each_row_where_results_could_differ(options: dict[str, Any], models: tuple[Any, Any]) -> None:
    plain, streamed = models
    found = []
    for model in (plain, streamed):
        counted = Computed(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers on use_cache
            result = generated(model, **prompts(2, 3), **options)
        found.append((getattr(result, "sequences", result), counted.taken()))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def test_chunks_of_prompts_are_as_large_as_with_all_rows(models: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, streamed = models
    given = prompts(2, 3)
    chunks: list[tuple[int, ...]] = []

    def seen(_: Any, args: tuple[Tensor, ...]) -> None:
        chunks.append(tuple(args[0].shape))

    monkeypatch.setattr(ways, "_prefills", lambda *_: iter([{"prefill_chunk_size": 1}]))
    hook = streamed.model.embed_tokens.register_forward_pre_hook(seen)
    tokens = generated(streamed, **given)
    hook.remove()
    assert torch.equal(tokens, generated(plain, **given))
    assert chunks[:4] == [(2, 3), (2, 3), (2, 2), (6, 1)]


@pytest.mark.parametrize(("rows", "expected"), [
    ("aaaa", 4), ("aabb", 2), ("abab", 1), ("aabbb", 1), ("aaab", 1), ("abcd", 1), ("aaabbb", 3), ("a", 1)])
def test_equal_rows_are_counted_if_all_prompts_have_as_many(rows: str, expected: int) -> None:
    ids = torch.tensor([[ord(each), 5] for each in rows])
    assert equal_rows({"input_ids": ids}) == expected


def test_rows_that_differ_in_their_mask_are_not_equal() -> None:
    mask = torch.tensor([[1, 1], [0, 1]])
    assert equal_rows({"input_ids": torch.zeros(2, 2, dtype=torch.long), "attention_mask": mask}) == 1
